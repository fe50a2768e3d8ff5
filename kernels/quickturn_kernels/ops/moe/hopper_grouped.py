"""The experts' products over many tokens on a Hopper GPU: the launches of csrc/cuda/moe_grouped.cu."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear import PLAIN
from quickturn_kernels.ops.moe.hopper_route import MAX_EXPERTS, make_tiles
from quickturn_kernels.ops.moe.triton import combine
from quickturn_kernels.ops.moe.triton_tiles import Tiles
from quickturn_kernels.ops.moe.weights import ExpertWeights, SharedExpert
from quickturn_kernels.platform import describe

TILE_ROWS = ((8, 16), (24, 32), (64, 64))
"""Up to so many tokens an expert on average, tiles of so many rows; above, tiles of `MOST_ROWS`."""

MOST_ROWS = 128


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "out", "bias")),
        *((name, ctypes.c_void_p) for name in ("tile_experts", "tile_pairs", "tile_rows", "tiles")),
        ("row_pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("pairs_a_row", "columns", "features", "gated", "oss")),
    ]


def takes(x: Tensor, experts: ExpertWeights) -> bool:
    """Whether `moe` can do this layer: bfloat16, H a multiple of 8, I of 64, rows 16-byte aligned."""
    biases = (experts.gate_up_bias, experts.down_bias)
    return (
        x.dtype == experts.gate_up.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and experts.layout == PLAIN
        and experts.count <= MAX_EXPERTS
        and experts.hidden % 8 == 0
        and experts.intermediate % 64 == 0
        and all(bias is None or (bias.dtype == x.dtype and bias.is_contiguous()) for bias in biases)
    )


def tile_rows(pairs: int, experts: int) -> int:
    """Rows of a tile for so many pairs: most experts' tokens should fit into one."""
    average = pairs / experts
    return next((rows for most, rows in TILE_ROWS if average <= most), MOST_ROWS)


def moe(
    x: Tensor,
    experts: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    shared: SharedExpert | None,
    rows: int | None = None,
) -> Tensor:
    """See `quickturn_kernels.moe`. rows: of a tile (16, 32, 64, 128), by default as `tile_rows` says."""
    top, pairs = chosen.shape[1], chosen.numel()
    tiles = make_tiles(chosen, experts.count, rows or tile_rows(pairs, experts.count))
    between = torch.empty((pairs, experts.intermediate), dtype=x.dtype, device=x.device)
    grouped(x, top, experts.gate_up, experts.gate_up_bias, tiles, between, experts, gated=True)
    results = torch.empty((pairs, experts.hidden), dtype=x.dtype, device=x.device)
    grouped(between, 1, experts.down, experts.down_bias, tiles, results, experts, gated=False)
    return combine(x, results, weights, chosen, experts.count, shared)


def grouped(
    rows: Tensor,
    pairs_a_row: int,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Tiles,
    out: Tensor,
    experts: ExpertWeights,
    *,
    gated: bool,
) -> None:
    """out[pair] = weight[expert of the pair] @ rows[pair / pairs_a_row] + bias, with `gated` the activation.

    Raises RuntimeError if the launch fails.
    """
    device = rows.device
    arguments = _Arguments(
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        tile_experts=tiles.experts.data_ptr(),
        tile_pairs=tiles.pairs.data_ptr(),
        tile_rows=tiles.rows.data_ptr(),
        tiles=tiles.used.data_ptr(),
        row_pitch=rows.stride(0),
        pairs_a_row=pairs_a_row,
        columns=rows.shape[1],
        features=out.shape[1],
        gated=gated,
        oss=experts.activation == "gpt_oss",
    )
    code = _function(device)(
        ctypes.byref(arguments),
        weight.data_ptr(),
        experts.count,
        tiles.pairs.shape[1],
        describe(device).units,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"grouped product of {tuple(rows.shape)}, {tuple(weight.shape)}: CUDA error {code}"
        )


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_moe_grouped
    whole, pointer = ctypes.c_int, ctypes.c_void_p
    function.argtypes = [ctypes.POINTER(_Arguments), pointer, whole, whole, whole, pointer]
    function.restype = whole
    return function
