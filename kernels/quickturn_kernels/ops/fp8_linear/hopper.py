"""Products with fp8 weights on Hopper: few rows stream the weight, many go to the fp8 tensor cores."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.activation import silu_and_mul
from quickturn_kernels.ops.fp8_linear.hopper_launch import (
    COLUMN_UNIT,
    HOPPER_BLOCK,
    HOPPER_CHANNEL,
    choose,
    launch,
    permute_columns,
    takes,
)
from quickturn_kernels.ops.fp8_linear.hopper_quantize import quantize
from quickturn_kernels.ops.fp8_linear.triton import multiply
from quickturn_kernels.ops.linear import LinearWeight
from quickturn_kernels.ops.linear.fp8 import BLOCK, FP8_BLOCK, FP8_CHANNEL
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

LAYOUTS = {FP8_BLOCK: HOPPER_BLOCK, FP8_CHANNEL: HOPPER_CHANNEL}
DTYPES = (torch.bfloat16, torch.float16)
ROW_UNIT = 16
"""Many rows are padded to a multiple of it, as the library's product wants."""

SCALED_COLUMNS = 4 * BLOCK
"""cuBLAS wants rows of block scales 16 bytes apart; torch 2.11 takes them only without gaps."""


def prepare(weight: LinearWeight) -> LinearWeight:
    """The columns in the order of the few-row kernel, where their number allows. See
    `quickturn_kernels.prepare_fp8_linear`.
    """
    features, columns = weight.shape
    if columns % COLUMN_UNIT or features % COLUMN_UNIT:
        return weight
    matrix, scale = weight.tensors
    return LinearWeight(weight.shape, weight.dtype, LAYOUTS[weight.layout], (permute_columns(matrix), scale))


def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`. Up to 64 rows of x are taken as they are, more are quantised."""
    dtype = x.dtype if out_dtype is None else out_dtype
    if takes(x, weight, bias) and dtype in (x.dtype, torch.float32):
        features, columns = weight.shape
        out = torch.empty((x.shape[0], features), dtype=dtype, device=x.device)
        launch(x, weight, bias, out, choose(x.shape[0], features, columns, False))
        return out
    return _many_rows(x, weight, bias, dtype)


def linear_silu_and_mul(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """See `quickturn_kernels.linear_silu_and_mul`."""
    features, columns = weight.shape
    if not takes(x, weight, bias) or features % 2 * COLUMN_UNIT:
        return silu_and_mul(linear(x, weight, bias, None))
    out = torch.empty((x.shape[0], features // 2), dtype=x.dtype, device=x.device)
    launch(x, weight, bias, out, choose(x.shape[0], features, columns, True), gated=True)
    return out


def _many_rows(x: Tensor, weight: LinearWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Both operands in e4m3; torch hands the product to cuBLAS (block scales) or CUTLASS (row scales), where
    it takes it.
    """
    rows, columns = x.shape
    if rows == 0:
        return torch.empty((0, weight.shape[0]), dtype=dtype, device=x.device)
    padded = -(-rows // ROW_UNIT) * ROW_UNIT
    matrix, scale = weight.tensors
    block = weight.layout == HOPPER_BLOCK
    quantized, x_scale = quantize(x, padded, whole=not block)
    if columns % SCALED_COLUMNS if block else dtype != torch.bfloat16:
        out = torch.empty((rows, weight.shape[0]), dtype=dtype, device=x.device)
        multiply(quantized[:rows], x_scale[:rows], matrix, scale, bias, out)
        return out
    by = scale.t() if block else scale[None, :]
    out = torch._scaled_mm(quantized, matrix.t(), x_scale, by, out_dtype=dtype)[:rows]
    return out if bias is None else out.add_(bias)


if cuda_build.available((9, 0)):
    register(
        "prepare_fp8_linear",
        name="hopper",
        platform=HOPPER,
        traits={"layout": set(LAYOUTS)},
        priority=Priority.SPECIALIZED,
    )(prepare)
    for _op, _function in (("linear", linear), ("linear_silu_and_mul", linear_silu_and_mul)):
        register(
            _op,
            name="hopper_fp8",
            platform=HOPPER,
            dtypes=DTYPES,
            traits={"layout": set(LAYOUTS.values())},
            priority=Priority.SPECIALIZED,
        )(_function)
