"""How products that norm their rows, or add to the residual stream, are spread over a Hopper GPU, and their
launches. K is split as without the norm, so that a result has the same bits.
"""

import ctypes
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear.hopper_launch import (
    AT_ONCE,
    MAX_STAGES,
    MIN_STAGES,
    RING_LIMIT,
    Plan,
    geometry,
    structure,
)
from quickturn_kernels.ops.linear.hopper_launch import choose as choose_plain
from quickturn_kernels.ops.linear.hopper_launch import takes as takes_plain
from quickturn_kernels.platform import describe

MAX_ROWS = 8
"""More rows than this are more columns of a product, and a norm's launch is small beside them."""

MAX_COLUMNS = 8192
"""Of a norm: all of it lies in shared memory, and its sums have places for so many."""

SWIZZLED = 0
"""The chunk pitch that stands for rows of 128 bytes in the copy engine's swizzle, always eight of them."""


def chunk_pitch(rows: int) -> int:
    """How the normed rows lie in shared memory: chunks of 16 bytes from one of a row to its next, an odd
    number; eight rows fill the swizzled layout.
    """
    return SWIZZLED if rows == MAX_ROWS else rows | 1


def takes_norm(
    residual: Tensor, branch: Tensor | None, norm_weight: Tensor, weight: Tensor, bias: Tensor | None
) -> bool:
    """Whether `launch_norm` can do this: rows that are read 16 bytes at a time."""
    return (
        takes_plain(residual, weight, bias)
        and residual.shape[0] <= MAX_ROWS
        and residual.shape[1] <= MAX_COLUMNS
        and norm_weight.dtype in (residual.dtype, torch.float32)
        and norm_weight.is_contiguous()
        and norm_weight.data_ptr() % 16 == 0
        and (branch is None or _beside(branch, residual))
    )


def takes_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, branch: Tensor | None
) -> bool:
    """Whether `launch_add` can do this."""
    return (
        takes_plain(x, weight, bias)
        and x.shape[0] <= MAX_ROWS
        and residual.dtype == x.dtype
        and residual.shape[1] % 8 == 0
        and _aligned(residual)
        and (branch is None or _beside(branch, residual))
    )


def _beside(branch: Tensor, residual: Tensor) -> bool:
    return branch.dtype == residual.dtype and branch.shape == residual.shape and _aligned(branch)


def _aligned(rows: Tensor) -> bool:
    return rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


@cache
def choose(rows: int, weight_rows: int, columns: int, gated: bool, pitch: int) -> Plan:
    """The plan of `ops.linear` with as many stages as fit beside the normed rows."""
    plan = Plan(*geometry(weight_rows, columns), MIN_STAGES, trigger=AT_ONCE)
    features = weight_rows // 2 if gated else weight_rows
    fitting = [
        n
        for n in range(MIN_STAGES, MAX_STAGES + 1)
        if shared_memory(rows, features, columns, gated, replace(plan, stages=n), pitch) <= RING_LIMIT
    ]
    return replace(plan, stages=max(fitting, default=MIN_STAGES))


def shared_memory(rows: int, features: int, columns: int, gated: bool, plan: Plan, pitch: int) -> int:
    """Bytes of dynamic shared memory that the kernel with a norm will ask for (as computed in
    norm_linear.cu).
    """
    slices = 2 if plan.tile_rows <= 64 else 1
    chunks = -(-columns // (64 * slices))
    normed = -(-chunks // plan.split) * slices * 8 * (pitch or MAX_ROWS) * 16
    ring = plan.stages * slices * plan.tile_rows * 128
    sums = rows * (plan.tile_rows + 4) * 4
    tiles = -(-features // (plan.tile_rows // 2 if gated else plan.tile_rows))
    overread = -plan.tile_rows % 64 * 128
    behind = sums - ring if plan.split > 1 or tiles <= plan.blocks else sums
    return 1024 + -(-normed // 1024) * 1024 + ring + max(overread, behind)


def launch_norm(
    residual: Tensor,
    branch: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    plan: Plan | None = None,
    pitch: int | None = None,
) -> None:
    """`out = rms_norm(residual + branch) @ weight.T + bias`; with `gated`, silu of its first half times the
    second half. out: bfloat16 or float32 [T, N or N / 2], contiguous. plan, pitch: by default the chosen
    ones. Raises RuntimeError if the launch fails.
    """
    rows, columns = residual.shape
    pitch = chunk_pitch(rows) if pitch is None else pitch
    plan = choose(rows, weight.shape[0], columns, gated, pitch) if plan is None else plan
    code = _norm_function(residual.device)(
        residual.data_ptr(),
        residual.stride(0),
        None if branch is None else branch.data_ptr(),
        0 if branch is None else branch.stride(0),
        norm_weight.data_ptr(),
        norm_weight.dtype == torch.float32,
        eps,
        pitch,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        out.shape[1],
        columns,
        gated,
        out.dtype == torch.float32,
        ctypes.byref(structure(plan)),
        torch.cuda.current_stream(residual.device).cuda_stream,
    )
    if code != 0:
        shapes = f"{tuple(residual.shape)} x {tuple(weight.shape)}"
        raise RuntimeError(f"norm and linear {shapes}, {plan}, pitch {pitch}: CUDA error {code}")


def launch_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    branch: Tensor | None,
    *,
    plan: Plan | None = None,
) -> None:
    """`residual += branch; residual += x @ weight.T + bias`. plan: by default that of `ops.linear`. Raises
    RuntimeError if the launch fails.
    """
    rows, columns = x.shape
    plan = choose_plain(rows, weight.shape[0], columns, False) if plan is None else plan
    code = _add_function(x.device)(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        residual.data_ptr(),
        residual.stride(0),
        None if branch is None else branch.data_ptr(),
        0 if branch is None else branch.stride(0),
        rows,
        residual.shape[1],
        columns,
        ctypes.byref(structure(plan)),
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if code != 0:
        shapes = f"{tuple(x.shape)} x {tuple(weight.shape)}"
        raise RuntimeError(f"linear and add {shapes}, {plan}: CUDA error {code}")


_POINTER, _WHOLE, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong


@cache
def _norm_function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_norm_linear
    function.argtypes = [
        _POINTER,
        _LONG,
        _POINTER,
        _LONG,
        _POINTER,
        _WHOLE,
        ctypes.c_float,
        _WHOLE,
        *[_POINTER] * 3,
        *[_WHOLE] * 5,
        *[_POINTER] * 2,
    ]
    function.restype = _WHOLE
    return function


@cache
def _add_function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_linear_add
    function.argtypes = [
        _POINTER,
        _LONG,
        *[_POINTER] * 3,
        _LONG,
        _POINTER,
        _LONG,
        *[_WHOLE] * 3,
        *[_POINTER] * 2,
    ]
    function.restype = _WHOLE
    return function
