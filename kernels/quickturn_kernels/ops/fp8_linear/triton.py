"""Activations to e4m3, and products with fp8 weights, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.linear import LinearWeight
from quickturn_kernels.ops.linear.fp8 import BLOCK, FP8, FP8_BLOCK, FP8_CHANNEL
from quickturn_kernels.platform import TRITON_FP8
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, INTERPRETED, next_power_of_two
from quickturn_kernels.triton_fp8 import to_e4m3

MAX_CONST = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-12)
ROW_CHUNK: int = 4096
FEW_TILE_ROWS = 16


@triton.jit
def quantize_groups_kernel(
    x,
    out,
    scales,
    rows,
    columns,
    x_stride,
    out_stride,
    scale_row_stride,
    scale_group_stride,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PERMUTED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """ROWS rows and one group of columns. Rows past `rows` are written as zeros. PERMUTED: within each 16
    columns in the order of `hopper_launch.ORDER`.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    column = place
    if PERMUTED:
        within = place % 16
        column = place - within + within // 4 * 2 + within % 2 * 8 + within % 4 // 2
    real = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=real, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(value), axis=1), SMALLEST), MAX_CONST)
    scaled = tl.clamp(tl.div_rn(value, scale[:, None]), -MAX_CONST, MAX_CONST)
    inside = (column < columns)[None, :]
    tl.store(out + row[:, None] * out_stride + place[None, :], to_e4m3(scaled, out, ROUND), mask=inside)
    tl.store(scales + row * scale_row_stride + tl.program_id(1) * scale_group_stride, scale)


@triton.jit
def quantize_rows_kernel(
    x,
    out,
    scales,
    rows,
    columns,
    x_stride,
    out_stride,
    CHUNK: tl.constexpr,
    PERMUTED: tl.constexpr,
    ROUND: tl.constexpr,
):
    """One whole row, as `quantize_groups_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    there = tl.where(row < rows, columns, 0)
    top = tl.zeros([CHUNK], tl.float32)
    for start in range(0, columns, CHUNK):
        at = start + tl.arange(0, CHUNK)
        value = tl.load(x + row * x_stride + at, mask=at < there, other=0.0)
        top = tl.maximum(top, tl.abs(value.to(tl.float32)))
    scale = tl.div_rn(tl.maximum(tl.max(top, axis=0), SMALLEST), MAX_CONST)
    for start in range(0, columns, CHUNK):
        place = start + tl.arange(0, CHUNK)
        column = place
        if PERMUTED:
            within = place % 16
            column = place - within + within // 4 * 2 + within % 2 * 8 + within % 4 // 2
        value = tl.load(x + row * x_stride + column, mask=column < there, other=0.0).to(tl.float32)
        scaled = tl.clamp(tl.div_rn(value, scale), -MAX_CONST, MAX_CONST)
        tl.store(out + row * out_stride + place, to_e4m3(scaled, out, ROUND), mask=column < columns)
    tl.store(scales + row, scale)


def quantize_groups(x: Tensor, *, rows: int | None = None, permuted: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, K] as e4m3 [rows, K] and scales [rows, ceil(K / 128)], one for 128 columns of a row.

    rows: T or more, the rest are zeros. permuted: in the column order of the Hopper layouts. The scales of
    one group lie side by side (the second stride is `rows`), as cuBLAS wants them.
    """
    count, columns = x.shape
    rows = count if rows is None else rows
    if x.stride(1) != 1:
        x = x.contiguous()
    groups = -(-columns // BLOCK)
    out = torch.empty((rows, columns), dtype=torch.uint8, device=x.device).view(FP8)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device).t()
    if rows == 0:
        return out, scales
    tile = 16 if rows % 16 == 0 else 4 if rows % 4 == 0 else 1
    quantize_groups_kernel[(rows // tile, groups)](
        x,
        out,
        scales,
        count,
        columns,
        x.stride(0),
        out.stride(0),
        scales.stride(0),
        scales.stride(1),
        ROWS=tile,
        GROUP=BLOCK,
        PERMUTED=permuted,
        ROUND=INTERPRETED,
        num_warps=4 if tile == 16 else 1,
    )
    return out, scales


def quantize_whole_rows(
    x: Tensor, *, rows: int | None = None, permuted: bool = False
) -> tuple[Tensor, Tensor]:
    """As `quantize_groups`, with one scale a row: scales [rows, 1]."""
    count, columns = x.shape
    rows = count if rows is None else rows
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((rows, columns), dtype=torch.uint8, device=x.device).view(FP8)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        quantize_rows_kernel[(rows,)](
            x,
            out,
            scales,
            count,
            columns,
            x.stride(0),
            out.stride(0),
            CHUNK=min(ROW_CHUNK, next_power_of_two(columns)),
            PERMUTED=permuted,
            ROUND=INTERPRETED,
            num_warps=4,
        )
    return out, scales


@triton.jit
def linear_kernel(
    x,
    x_scale,
    weight,
    scale,
    bias,
    out,
    rows,
    features,
    columns,
    x_scale_row_stride,
    x_scale_group_stride,
    scale_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIASED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile of out [BLOCK_M, BLOCK_N]; BLOCKED: scales for each 128 columns, else for whole rows."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at = x + row.to(tl.int64)[:, None] * columns
    weight_at = weight + feature.to(tl.int64)[:, None] * columns
    inside = row < rows
    present = feature < features
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, tl.cdiv(columns, BLOCK_K)):
        column = group * BLOCK_K + tl.arange(0, BLOCK_K)
        real = column < columns
        a = tl.load(x_at + column[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        b = tl.load(weight_at + column[None, :], mask=present[:, None] & real[None, :], other=0.0)
        if UPCAST:
            product = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")
        else:
            product = tl.dot(a, tl.trans(b))
        if BLOCKED:
            mine = tl.load(
                x_scale + row * x_scale_row_stride + group * x_scale_group_stride, mask=inside, other=0.0
            )
            theirs = tl.load(scale + feature // BLOCK_K * scale_stride + group, mask=present, other=0.0)
            total += product * mine[:, None] * theirs[None, :]
        else:
            total += product
    if not BLOCKED:
        mine = tl.load(x_scale + row, mask=inside, other=0.0)
        total *= mine[:, None] * tl.load(scale + feature, mask=present, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + feature, mask=present, other=0.0).to(tl.float32)[None, :]
    out_at = out + row.to(tl.int64)[:, None] * features + feature[None, :]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=inside[:, None] & present[None, :])


@register(
    "linear",
    name="triton_fp8",
    platform=TRITON_FP8,
    dtypes=FLOATS,
    traits={"layout": {FP8_BLOCK, FP8_CHANNEL}},
    priority=Priority.PORTABLE,
)
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`. x is quantised."""
    rows = x.shape[0]
    out = torch.empty(
        (rows, weight.shape[0]), dtype=x.dtype if out_dtype is None else out_dtype, device=x.device
    )
    blocked = weight.layout == FP8_BLOCK
    quantized, x_scale = quantize_groups(x) if blocked else quantize_whole_rows(x)
    matrix, scale = weight.tensors
    multiply(quantized, x_scale, matrix, scale, bias, out)
    return out


def multiply(
    x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """`out = x @ weight.T + bias` of e4m3 operands, in float32. x_scale: [T, 1] or [T, ceil(K / 128)]; scale:
    [N], or block scales.
    """
    rows, columns = x.shape
    features = weight.shape[0]
    if rows == 0:
        return
    few = rows <= FEW_TILE_ROWS
    tile_rows, tile_features = (16, 32) if few else (64 if rows <= 64 else 128, 128)
    linear_kernel[(triton.cdiv(features, tile_features), triton.cdiv(rows, tile_rows))](
        x,
        x_scale,
        weight,
        scale,
        bias,
        out,
        rows,
        features,
        columns,
        x_scale.stride(0),
        x_scale.stride(1),
        scale.stride(0),
        BLOCK_M=tile_rows,
        BLOCK_N=tile_features,
        BLOCK_K=BLOCK,
        BLOCKED=scale.ndim == 2,
        BIASED=bias is not None,
        UPCAST=INTERPRETED,
        num_warps=4 if tile_rows < 128 else 8,
        num_stages=4 if few else 3,
    )
