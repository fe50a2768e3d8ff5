"""The layout of fp8 weights on Hopper, how a product of few rows is spread over the GPU, and its launch."""

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear import FEW_ROWS, LinearWeight
from quickturn_kernels.ops.linear.fp8 import BLOCK
from quickturn_kernels.platform import describe

HOPPER_BLOCK = "hopper_fp8_block"
HOPPER_CHANNEL = "hopper_fp8_channel"
"""As `fp8_block` and `fp8_channel`, with the columns permuted."""

COLUMN_UNIT = 16
ORDER = tuple(column for q in range(4) for column in (2 * q, 2 * q + 8, 2 * q + 1, 2 * q + 9))
"""Which of 16 columns lies at each place: thread q of four loads four bytes at once, and the even and the odd
ones are its two pairs of a product's left operand (PTX ISA, wgmma: register fragments of A).
"""

UNITS = 132
"""Multiprocessors of an H100 or H200 (SXM): what plans are made for."""

MAX_TILE_ROWS = 192
PRODUCT_ROWS = 64
MAX_STAGES = 24
RING_LIMIT = 231_000
"""Bytes of shared memory for one block."""

MEMORY_RATE, CACHE_RATE, CONVERSION_RATE = 32.0, 65.0, 31.0
"""Bytes a nanosecond of one multiprocessor: its share of memory and of L2, and fp8 weights made 16 bits."""

MEETING = 700.0
"""Nanoseconds that the blocks of a cluster take to add up."""


@dataclass(frozen=True)
class Plan:
    """tile_rows: rows of the weight in a tile, a multiple of 16 (gated: 32) up to 192. split: blocks that
    share a tile's K (1, 2, 4, 8). blocks: without split, how many blocks the tiles are dealt to. stages: of a
    block's ring, a multiple of `groups_of`. early: start before the kernel ahead has finished.
    """

    tile_rows: int
    split: int
    blocks: int
    stages: int
    early: bool = True


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("tile_rows", "split", "blocks", "stages", "early")]


def permute_columns(weight: Tensor) -> Tensor:
    """A weight [N, K] of one-byte elements in the order that the kernel reads, K a multiple of 16."""
    order = torch.tensor(ORDER, device=weight.device)
    groups = weight.view(torch.uint8).view(weight.shape[0], -1, COLUMN_UNIT)
    permuted: Tensor = groups[:, :, order].view(weight.shape)
    return permuted.view(weight.dtype)


def takes(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> bool:
    """Whether `launch` can do this product: 16-bit rows that the copy engine can address."""
    return (
        0 < x.shape[0] <= FEW_ROWS
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    )


def launch(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, out: Tensor, plan: Plan, *, gated: bool = False
) -> None:
    """`out = x @ weight.T + bias`; with `gated`, silu of its first half times the second half.

    x: bfloat16 or float16 [1..64, K], rows 16-byte aligned. weight: in one of the two layouts. bias: [N] of
    x.dtype. out: x.dtype or float32 [T, N or N / 2], contiguous. Raises RuntimeError if the launch fails.
    """
    rows, columns = x.shape
    device = x.device
    matrix, scale = weight.tensors
    block = weight.layout == HOPPER_BLOCK
    code = _function(device)(
        x.data_ptr(),
        x.stride(0),
        matrix.data_ptr(),
        scale.data_ptr() if block else None,
        None if block else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        scale.stride(0),
        rows,
        out.shape[1],
        columns,
        gated,
        out.dtype == torch.float32,
        x.dtype == torch.float16,
        ctypes.byref(_structure(plan)),
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"few-row fp8 linear {tuple(x.shape)} x {weight.shape}, {plan}: CUDA error {code}")


@cache
def choose(rows: int, weight_rows: int, columns: int, gated: bool) -> Plan:
    """The plan for a product with a weight of [weight_rows, columns] that should take least time."""
    best, best_time = None, float("inf")
    unit = 32 if gated else 16
    for tile_rows, split in product(range(MAX_TILE_ROWS, 0, -unit), (1, 2, 4, 8)):
        plan = geometry(weight_rows, columns, tile_rows, split)
        if plan is not None and (time := _time(rows, weight_rows, columns, plan)) < best_time:
            best, best_time = plan, time
    assert best is not None
    return with_stages(best, rows, weight_rows // 2 if gated else weight_rows, gated)


def with_stages(plan: Plan, rows: int, features: int, gated: bool) -> Plan:
    """The plan with as many stages as there is room for."""
    step = groups_of(rows, plan.tile_rows)
    fitting = [
        stages
        for stages in range(step, MAX_STAGES + 1, step)
        if shared_memory(rows, features, gated, replace(plan, stages=stages)) <= RING_LIMIT
    ]
    return replace(plan, stages=max(fitting, default=step))


def groups_of(rows: int, tile_rows: int) -> int:
    """Warpgroups of a block that multiply (groups_of in linear_fp8.cu)."""
    products = -(-tile_rows // PRODUCT_ROWS)
    if rows <= 16:
        return 4
    if rows <= 32:
        return 4 if products == 1 else 3
    return 3 if products == 1 else 2


def geometry(weight_rows: int, columns: int, tile_rows: int, split: int) -> Plan | None:
    """Tiles of `tile_rows`, their K in `split` parts, not yet with stages; None if that isn't possible or
    a split wouldn't fit the machine at once.
    """
    tiles = -(-weight_rows // tile_rows)
    if split == 1:
        waves = -(-tiles // UNITS)
        return Plan(tile_rows, 1, -(-tiles // waves), 1)
    # Clusters of four or eight don't fill every part of the machine: only where there's little to do.
    room = UNITS if split == 2 else UNITS // 2
    if tiles * split > room or -(-columns // BLOCK) < 2 * split or tile_rows // split % 8:
        return None
    return Plan(tile_rows, split, UNITS, 1)


def _time(rows: int, weight_rows: int, columns: int, plan: Plan) -> float:
    """Nanoseconds that the busiest multiprocessor should need, by what limits it most."""
    tiles = -(-weight_rows // plan.tile_rows)
    waves = 1 if plan.split > 1 else -(-tiles // plan.blocks)
    chunks = -(-columns // BLOCK)
    depth = -(-chunks // plan.split) * BLOCK * waves
    weight = plan.tile_rows * depth
    converted = -(-plan.tile_rows // PRODUCT_ROWS) * PRODUCT_ROWS * depth
    busiest = max(weight / MEMORY_RATE, (weight + 2 * rows * depth) / CACHE_RATE, converted / CONVERSION_RATE)
    return busiest + (MEETING if plan.split > 1 else 0.0)


def shared_memory(rows: int, features: int, gated: bool, plan: Plan) -> int:
    """Bytes of dynamic shared memory that the kernel will ask for (as computed in linear_fp8.cu)."""
    padded = next(n for n in (8, 16, 32, 64) if rows <= n)
    ring = plan.stages * (plan.tile_rows + 2 * padded) * BLOCK
    sums = groups_of(rows, plan.tile_rows) * rows * (plan.tile_rows + 4) * 4
    tiles = -(-features // (plan.tile_rows // 2 if gated else plan.tile_rows))
    overread = -plan.tile_rows % PRODUCT_ROWS * BLOCK
    behind = sums - ring if plan.split > 1 or tiles <= plan.blocks else sums
    return 1024 + ring + max(overread, behind)


@cache
def _structure(plan: Plan) -> _Plan:
    return _Plan(plan.tile_rows, plan.split, plan.blocks, plan.stages, plan.early)


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_linear_fp8_few_rows
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        pointer,
        ctypes.c_longlong,
        *[pointer] * 5,
        *[whole] * 7,
        ctypes.POINTER(_Plan),
        pointer,
    ]
    function.restype = whole
    return function
