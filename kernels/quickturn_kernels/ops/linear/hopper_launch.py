"""How one product of few rows is spread over a Hopper GPU, and its launch."""

import ctypes
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.platform import describe

FEW_ROWS = 64
"""The most rows the kernel takes."""

BOX_ROWS = 64
CHUNK = 64


@dataclass(frozen=True)
class Plan:
    """boxes: 64-row boxes of the weight in a tile, 1 or 2. split: blocks that share a tile's K (1, 2, 4,
    8). blocks: without split, how many blocks the tiles are dealt to. stages: boxes in flight in a block's
    ring. prefetch: stages asked into L2 beyond the ring while the kernel ahead still runs. early: start
    before the kernel ahead has finished.
    """

    boxes: int
    split: int
    blocks: int
    stages: int
    prefetch: int
    early: bool = True


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("boxes", "split", "blocks", "stages", "prefetch", "early")]


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, plan: Plan, *, gated: bool = False
) -> None:
    """`out = x @ weight.T + bias`; with `gated`, silu of its first half times the second half.

    x: bfloat16 [1..64, K], K a multiple of 8, rows 16-byte aligned. weight: bfloat16 [N, K] contiguous.
    bias: bfloat16 [N]. out: bfloat16 or float32 [T, N or N / 2], contiguous. Raises RuntimeError if the
    launch fails.
    """
    rows, columns = x.shape
    device = x.device
    code = _function(device)(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        out.shape[1],
        columns,
        gated,
        out.dtype == torch.float32,
        ctypes.byref(_structure(plan)),
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"few-row linear {tuple(x.shape)} x {tuple(weight.shape)}, {plan}: CUDA error {code}"
        )


@cache
def choose(rows: int, features: int, columns: int, gated: bool) -> Plan:
    """The plan for a product of `features` outputs (pairs of them if gated)."""
    return replace(Plan(2, 1, 132, 4, 0), early=True)


@cache
def _structure(plan: Plan) -> _Plan:
    return _Plan(plan.boxes, plan.split, plan.blocks, plan.stages, plan.prefetch, plan.early)


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_linear_few_rows
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        pointer,
        ctypes.c_longlong,
        *[pointer] * 3,
        *[whole] * 5,
        ctypes.POINTER(_Plan),
        pointer,
    ]
    function.restype = whole
    return function
