"""What the sampling kernels share."""

import triton
import triton.language as tl

from quickturn_kernels.ops.sampling import noise

CHUNK = 4096
"""Tokens of the vocabulary that one program scans."""

LOG2_E = tl.constexpr(1.4426950408889634)
GREEDY_BELOW = tl.constexpr(1e-5)
_SERIES_BELOW = tl.constexpr(noise.SERIES_BELOW)
_LARGEST = tl.constexpr(1.0 - 2.0**-24)
_UNIT = tl.constexpr(2.0**-32)
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


@triton.jit
def _gumbel(word):
    """Noise of random words (uint32), as `noise.from_words`."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * _UNIT, _LARGEST)
    series = u + u * u * (0.5 + u * (1.0 / 3.0 + u * 0.25))
    return -tl.log(tl.where(u < _SERIES_BELOW, series, -tl.log(1.0 - u)))


@triton.jit
def _words(seed, position, third):
    """Four words for each element of `third` (int32)."""
    c2 = third.to(tl.uint32)
    zero = c2 * 0
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, c2, zero)


@triton.jit
def chunk_noise(seed, position, chunk, CHUNK: tl.constexpr):
    """Noise of the tokens of one chunk, in order; a group of four shares one call of philox."""
    group = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    w0, w1, w2, w3 = _words(seed, position, group)
    return tl.interleave(tl.interleave(_gumbel(w0), _gumbel(w2)), tl.interleave(_gumbel(w1), _gumbel(w3)))


@triton.jit
def token_noise(seed, position, token):
    """Noise of tokens in any order."""
    w0, w1, w2, w3 = _words(seed, position, token // 4)
    lane = token % 4
    return _gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def is_filtered(k, p, m, vocabulary):
    """Whether top-k, top-p or min-p may drop tokens of a row."""
    return ((k > 0) & (k < vocabulary)) | (p < 1.0) | (m > 0.0)
