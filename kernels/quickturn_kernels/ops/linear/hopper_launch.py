"""How one product of few rows is spread over a Hopper GPU, and its launch."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear import FEW_ROWS
from quickturn_kernels.platform import describe

UNITS = 132
"""Multiprocessors of an H100 or H200 (SXM): what plans are made for."""

MIN_TILE_ROWS = 48
SPLIT_TILE_ROWS = 64
MIN_SPLIT_COLUMNS = 512
MIN_STAGES, MAX_STAGES = 2, 16
RING_LIMIT = 231_000
"""Bytes of shared memory for one block."""

AT_ONCE = 1 << 20
"""More stages than any block has: the kernel behind may start with this one."""


@dataclass(frozen=True)
class Plan:
    """tile_rows: rows of the weight in a tile, a multiple of 8 (gated: 16) up to 192. split: blocks that
    share a tile's K (1, 2, 4, 8). blocks: without split, how many blocks the tiles are dealt to. stages: of a
    block's ring. trigger: the kernel behind may start when a block has so many stages left to request. early:
    start before the kernel ahead has finished.
    """

    tile_rows: int
    split: int
    blocks: int
    stages: int
    trigger: int
    early: bool = True


class PlanStructure(ctypes.Structure):
    """`LinearPlan` of few_rows_launch.cuh."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("tile_rows", "split", "blocks", "stages", "trigger", "early")
    ]


def takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `launch` can do this product: bfloat16 throughout, rows that the copy engine can address."""
    columns = weight.shape[1]
    return (
        0 < x.shape[0] <= FEW_ROWS
        and columns % 8 == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and weight.dtype == x.dtype
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


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
        ctypes.byref(structure(plan)),
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"few-row linear {tuple(x.shape)} x {tuple(weight.shape)}, {plan}: CUDA error {code}"
        )


@cache
def choose(rows: int, weight_rows: int, columns: int, gated: bool) -> Plan:
    """The plan for a product with a weight of [weight_rows, columns] that fills a Hopper GPU."""
    features = weight_rows // 2 if gated else weight_rows
    return plan_within(weight_rows, columns, lambda plan: shared_memory(rows, features, gated, plan))


def plan_within(weight_rows: int, columns: int, size: Callable[[Plan], int]) -> Plan:
    """The plan with as many stages as a block's shared memory has room for; `size`: the bytes of a plan."""
    plan = Plan(*geometry(weight_rows, columns), MIN_STAGES, trigger=AT_ONCE)
    plans = [replace(plan, stages=stages) for stages in range(MIN_STAGES, MAX_STAGES + 1)]
    return max((one for one in plans if size(one) <= RING_LIMIT), key=lambda one: one.stages, default=plan)


def geometry(weight_rows: int, columns: int) -> tuple[int, int, int]:
    """Tile rows, split and blocks: whole tiles where they keep most multiprocessors busy, else K is split.

    Of the tiles that leave the busiest multiprocessor the fewest rows the largest is taken: x is read once
    for each tile.
    """
    if weight_rows >= MIN_TILE_ROWS * UNITS * 7 // 8:
        whole = {rows: -(-weight_rows // rows) for rows in (192, 128, 96, 64, MIN_TILE_ROWS)}
        tile_rows = min(whole, key=lambda rows: (-(-whole[rows] // UNITS) * rows, -rows))
        waves = -(-whole[tile_rows] // UNITS)
        return tile_rows, 1, -(-whole[tile_rows] // waves)
    tiles = -(-weight_rows // SPLIT_TILE_ROWS)
    fitting = [n for n in (1, 2, 4) if tiles * n <= UNITS and columns // n >= MIN_SPLIT_COLUMNS]
    return SPLIT_TILE_ROWS, max(fitting, default=1), UNITS


def shared_memory(rows: int, features: int, gated: bool, plan: Plan) -> int:
    """Bytes of dynamic shared memory that the kernel will ask for (as computed in few_rows_launch.cuh)."""
    return ring_memory(rows, features, gated, plan, padded=next(n for n in (8, 16, 32, 64) if rows <= n))


def ring_memory(rows: int, features: int, gated: bool, plan: Plan, *, padded: int) -> int:
    """Those of the ring, in whose stages lie `padded` rows of x, and of the sums."""
    slices = 2 if plan.tile_rows <= 64 else 1
    ring = plan.stages * slices * (plan.tile_rows + padded) * 128
    sums = rows * (plan.tile_rows + 4) * 4
    tiles = -(-features // (plan.tile_rows // 2 if gated else plan.tile_rows))
    overread = -plan.tile_rows % 64 * 128
    behind = sums - ring if plan.split > 1 or tiles <= plan.blocks else sums
    return 1024 + ring + max(overread, behind)


@cache
def structure(plan: Plan) -> PlanStructure:
    """The plan as the C functions take it."""
    return PlanStructure(plan.tile_rows, plan.split, plan.blocks, plan.stages, plan.trigger, plan.early)


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_linear_few_rows
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        pointer,
        ctypes.c_longlong,
        *[pointer] * 3,
        *[whole] * 5,
        ctypes.POINTER(PlanStructure),
        pointer,
    ]
    function.restype = whole
    return function
