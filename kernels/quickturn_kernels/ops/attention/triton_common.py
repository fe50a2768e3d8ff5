"""Pieces that the Triton decode and prefill attention share."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
LOG2_E_CONST = tl.constexpr(LOG2_E)
"""The same for kernels, whose globals must be constexpr."""


@triton.jit
def block_rows(table, start, end, BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys start .. start + BLOCK_N - 1 of a row lie: (block id, int64, scalar or [BLOCK_N];
    offset in it).

    start is a multiple of BLOCK_N; table entries at or past key `end` are never read. Tiles of one or two
    blocks need one or two scalar loads instead of one a key.
    """
    column = tl.arange(0, BLOCK_N)
    if BLOCK_TOKENS % BLOCK_N == 0:
        block = tl.load(table + start // BLOCK_TOKENS).to(tl.int64)
        offset = start % BLOCK_TOKENS + column
    elif BLOCK_N == 2 * BLOCK_TOKENS:
        index = start // BLOCK_TOKENS
        low = tl.load(table + index).to(tl.int64)
        high = tl.load(table + index + 1, mask=start + BLOCK_TOKENS < end, other=0).to(tl.int64)
        block = tl.where(column < BLOCK_TOKENS, low, high)
        offset = column % BLOCK_TOKENS
    else:
        at = start + column
        block = tl.load(table + at // BLOCK_TOKENS, mask=at < end, other=0).to(tl.int64)
        offset = at % BLOCK_TOKENS
    return block, offset


@triton.jit
def softcapped(scores, scale_log2, cap_log2, CAPPED: tl.constexpr):
    """Scores in units of log2: `s * scale`, squashed to `cap * tanh(s * scale / cap)` when CAPPED."""
    scaled = scores * scale_log2
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities; exp(y) = exp2(y log2 e), and cap_log2
        # holds log2 e.
        doubled = scaled * (2.0 * LOG2_E_CONST / cap_log2)
        scaled = cap_log2 * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
    return scaled


@triton.jit
def dot(a, b, UPCAST: tl.constexpr):
    """a @ b accumulated in float32; exact products for float32 operands; UPCAST for Triton's interpreter."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def elements(lines, dim, HEAD_DIM: tl.constexpr):
    """The mask [N, len(dim)] of the lines [N], and of the head's own elements where dim is padded to a power
    of two.
    """
    mask = lines[:, None]
    if dim.shape[0] != HEAD_DIM:
        mask = mask & (dim < HEAD_DIM)[None, :]
    return mask
