"""How products that norm their rows, or add to the residual stream, are spread over a Hopper GPU, and their
launches. K is split as without the norm, so that a result has the same bits.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear.hopper_launch import Plan, plan_within, ring_memory, structure
from quickturn_kernels.ops.linear.hopper_launch import choose as choose_plain
from quickturn_kernels.ops.linear.hopper_launch import takes as takes_plain
from quickturn_kernels.platform import describe

MAX_NORM_ROWS, MAX_COLUMNS = 4, 4096
"""Of a norm: each thread of a block holds its part of all rows in registers."""

MAX_ADD_ROWS = 8
"""More rows than this are more columns of a product."""


def rows_that_pay(weight_rows: int, columns: int) -> int:
    """Up to how many rows the norm costs less inside the product than as a kernel ahead of it, as measured
    (docs/performance/linear.md).

    Ahead, a norm overlaps with the first weights on their way; inside, every block does it again, and its
    products wait for it. That is long for a row of many columns, and beside a small weight.
    """
    if columns % 8 or columns > MAX_COLUMNS:
        return 0
    if columns <= 2048:
        return 2 if weight_rows * columns >= 20 << 20 else 0
    return 1 if weight_rows * columns >= 64 << 20 else 0


def takes_norm(x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `launch_norm` can do this: rows that are read 16 bytes at a time."""
    return (
        takes_plain(x, weight, bias)
        and x.shape[0] <= MAX_NORM_ROWS
        and x.shape[1] <= MAX_COLUMNS
        and norm_weight.dtype in (x.dtype, torch.float32)
        and norm_weight.is_contiguous()
        and norm_weight.data_ptr() % 16 == 0
    )


def takes_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> bool:
    """Whether `launch_add` can do this."""
    return (
        takes_plain(x, weight, bias)
        and x.shape[0] <= MAX_ADD_ROWS
        and residual.dtype == x.dtype
        and residual.shape[1] % 8 == 0
        and residual.stride(1) == 1
        and residual.stride(0) % 8 == 0
        and residual.data_ptr() % 16 == 0
    )


@cache
def choose(rows: int, weight_rows: int, columns: int, gated: bool) -> Plan:
    """The plan of `ops.linear` with as many stages as fit beside the normed rows."""
    features = weight_rows // 2 if gated else weight_rows
    return plan_within(weight_rows, columns, lambda plan: shared_memory(rows, features, columns, gated, plan))


def shared_memory(rows: int, features: int, columns: int, gated: bool, plan: Plan) -> int:
    """Bytes of dynamic shared memory that the kernel with a norm will ask for (as computed in
    norm_linear.cu).
    """
    slices = 2 if plan.tile_rows <= 64 else 1
    chunks = -(-columns // (64 * slices))
    normed = -(-chunks // plan.split) * slices * 8 * (rows | 1) * 16
    return -(-normed // 1024) * 1024 + ring_memory(rows, features, gated, plan, padded=0)


def launch_norm(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    gated: bool = False,
    plan: Plan | None = None,
) -> None:
    """`out = rms_norm(x) @ weight.T + bias`; with `gated`, silu of its first half times the second half. out:
    bfloat16 or float32 [T, N or N / 2], contiguous. plan: by default the chosen one. Raises RuntimeError if
    the launch fails.
    """
    rows, columns = x.shape
    plan = choose(rows, weight.shape[0], columns, gated) if plan is None else plan
    code = _norm_function(x.device)(
        x.data_ptr(),
        x.stride(0),
        norm_weight.data_ptr(),
        norm_weight.dtype == torch.float32,
        eps,
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        out.shape[1],
        columns,
        gated,
        out.dtype == torch.float32,
        ctypes.byref(structure(plan)),
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"norm and linear {tuple(x.shape)} x {tuple(weight.shape)}, {plan}: CUDA error {code}"
        )


def launch_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, *, plan: Plan | None = None
) -> None:
    """`residual += x @ weight.T + bias`. plan: by default that of `ops.linear`. Raises RuntimeError if the
    launch fails.
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
        rows,
        residual.shape[1],
        columns,
        ctypes.byref(structure(plan)),
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"linear and add {tuple(x.shape)} x {tuple(weight.shape)}, {plan}: CUDA error {code}"
        )


_POINTER, _WHOLE, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong


@cache
def _norm_function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_norm_linear
    function.argtypes = [
        _POINTER,
        _LONG,
        _POINTER,
        _WHOLE,
        ctypes.c_float,
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
        *[_WHOLE] * 3,
        *[_POINTER] * 2,
    ]
    function.restype = _WHOLE
    return function
