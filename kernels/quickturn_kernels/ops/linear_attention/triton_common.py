"""Pieces that the Triton kernels of linear attention share."""

import triton
import triton.language as tl

from quickturn_kernels.ops.attention.triton_common import LOG2_E_CONST

__all__ = ["dot", "exponential", "gates", "row_of", "silu"]


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b accumulated in float32; UPCAST for Triton's interpreter.

    Float32 operands are split into three narrower ones each: exact products of this size would be unrolled
    into code that takes minutes to compile.
    """
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def exponential(x):
    """e^x, right at minus infinity."""
    return tl.exp2(x * LOG2_E_CONST)


@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x / (1.0 + exponential(-x))


@triton.jit
def gates(a, b, a_log, dt_bias):
    """(log of the decay, beta) of float32 values that broadcast."""
    x = a + dt_bias
    small = exponential(-tl.abs(x))
    # log(1 + y) would round a small y away.
    log1p = tl.where(small < 1e-3, small * (1.0 - small * (0.5 - small / 3.0)), tl.log(1.0 + small))
    return -exponential(a_log) * (tl.maximum(x, 0.0) + log1p), 1.0 / (1.0 + exponential(-b))


@triton.jit
def row_of(query_start, slot, rows, SLOT_TOKENS: tl.constexpr, SPARE: tl.constexpr, ROWS_PAD: tl.constexpr):
    """(row, index of the slot within it) of a slot, where row r's slots begin at `query_start[r] //
    SLOT_TOKENS + SPARE * r`.

    Slots are given without a look at the lengths on the host; a row may have fewer than it could.
    """
    index = tl.arange(0, ROWS_PAD)
    first = tl.load(query_start + index, mask=index < rows, other=0) // SLOT_TOKENS + SPARE * index
    row = tl.sum(((index < rows) & (first <= slot)).to(tl.int32), axis=0) - 1
    start = tl.load(query_start + row)
    return row, slot - start // SLOT_TOKENS - SPARE * row
