"""What the sampling kernels share."""

import triton
import triton.language as tl

CHUNK = 4096
"""Tokens of the vocabulary that one program scans."""

LOG2_E = tl.constexpr(1.4426950408889634)
GREEDY_BELOW = tl.constexpr(1e-5)
FAR = tl.constexpr(0x7FFFFFFF)
"""Above every token and every key."""


@triton.jit
def order_key(value):
    """int32 that orders like the float32 value (two's complement from sign and magnitude)."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def chunk_weights(stats, row, inverse, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr):
    """(largest logit of each chunk, largest of all, each chunk's sum of exp((logit - largest of all) /
    temperature)).
    """
    chunk = tl.arange(0, CHUNKS_PAD)
    at = stats + (row * CHUNKS + chunk) * 4
    tops = tl.load(at, mask=chunk < CHUNKS, other=float("-inf"))
    sums = tl.load(at + 1, mask=chunk < CHUNKS, other=0.0)
    best = tl.max(tops, axis=0)
    sums = tl.where(tops > float("-inf"), sums * tl.exp2((tops - best) * inverse), 0.0)
    return tops, best, sums
