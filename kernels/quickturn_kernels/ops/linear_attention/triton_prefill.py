"""The gated delta rule over prompts in Triton, in two kernels.

In a chunk of N tokens with keys k_i, cumulative log decays g_i and the state S before it, the corrections
`u_i = beta_i (v_i - k_i^T S_i)` solve a triangular system: `(I + L) u = beta (v - e^g k S)`, with `L_ij =
beta_i e^(g_i - g_j) k_i k_j` below the diagonal (the UT transform of 2406.06484, gated as in 2412.06464).
`prepare_kernel` makes, for all chunks at once, what doesn't depend on the state: `(I + L)^-1 beta` and
`e^(g_i - g_j) q_i k_j`. `scan_kernel` walks through the chunks of a row with some columns of one head's
state. Keys and queries aren't normed in memory: their norms are factors of products.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.linear_attention import CHUNK, triton_recurrent
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.ops.linear_attention.triton_common import dot, exponential, gates, row_of
from quickturn_kernels.triton_common import INTERPRETED, next_power_of_two, rows_pad

SPARE = 2
"""Slots of a row beyond length // CHUNK: its first and its last chunk may be partial."""

FACTORS = 5
"""Kept for each token and head: cumulative log decay; factors of k in `k S` and in the update, of q, and k's
norm.
"""


@triton.jit
def chunk_place(query_start, context_lens, row, index, ALIGNED: tl.constexpr, CHUNK_TOKENS: tl.constexpr):
    """(first token in the batch, number of tokens) of a row's chunk; the number is <= 0 past the row's
    end.
    """
    start, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    skipped = 0
    if ALIGNED:
        skipped = (tl.load(context_lens + row) - (end - start)) % CHUNK_TOKENS
    first = tl.maximum(start, start + index * CHUNK_TOKENS - skipped)
    return first, tl.minimum(end, start + (index + 1) * CHUNK_TOKENS - skipped) - first


@triton.jit
def inverse(lower, PRECISION: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular [SIZE, SIZE], SIZE = 2^LEVELS, by merging inverses of
    diagonal blocks.

    The inverse of [[A, 0], [B, C]] is [[A', 0], [-C' B A', C']]. All blocks of one size at once: with X the
    inverses on the diagonal and M the parts of `lower` between pairs of them, X - X M X. Unlike a power
    series this never makes numbers larger than those of the result.
    """
    index = tl.arange(0, SIZE)
    result = (index[:, None] == index[None, :]).to(tl.float32)
    for level in tl.static_range(LEVELS):
        size = 1 << level
        block_row, block_column = index[:, None] // size, index[None, :] // size
        pair = (block_row // 2 == block_column // 2) & (block_row > block_column)
        between = tl.where(pair, lower, 0.0)
        if level == 0:
            result -= between
        else:
            right = tl.dot(between, result, input_precision=PRECISION)
            result -= tl.dot(result, right, input_precision=PRECISION)
    return result


@triton.jit
def prepare_kernel(
    q,
    k,
    a,
    b,
    a_log,
    dt_bias,
    query_start,
    context_lens,
    solved,
    scores,
    factors,
    rows,
    heads,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    a_stride,
    b_stride,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
    SPARE_SLOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One chunk, one k head and its v heads: `solved` and `scores` [slots, heads, N, N], `factors` [slots,
    heads, FACTORS, N].
    """
    slot, key_head = tl.program_id(0), tl.program_id(1)
    row, index = row_of(query_start, slot, rows, CHUNK_TOKENS, SPARE_SLOTS, ROWS_PAD)
    first, length = chunk_place(query_start, context_lens, row, index, ALIGNED, CHUNK_TOKENS)
    if length <= 0:
        return
    token, key = tl.arange(0, CHUNK_TOKENS), tl.arange(0, BLOCK_K)
    living = token < length
    mask = living[:, None] & (key < KEY_DIM)[None, :]
    at = first.to(tl.int64) + token
    keys = tl.load(k + at[:, None] * k_stride + key_head * k_head_stride + key[None, :], mask=mask, other=0.0)
    queries = tl.load(
        q + at[:, None] * q_stride + key_head * q_head_stride + key[None, :], mask=mask, other=0.0
    )
    wide = keys.to(tl.float32)
    key_norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6)
    wide = queries.to(tl.float32)
    query_norm = tl.rsqrt(tl.sum(wide * wide, axis=1) + 1e-6) * scale
    overlap = dot(keys, tl.trans(keys), UPCAST) * key_norm[:, None] * key_norm[None, :]
    attention = dot(queries, tl.trans(keys), UPCAST) * query_norm[:, None] * key_norm[None, :]
    before = token[:, None] > token[None, :]
    for member in range(GROUP):
        head = key_head * GROUP + member
        decay, beta = gates(
            tl.load(a + at * a_stride + head, mask=living, other=0.0).to(tl.float32),
            tl.load(b + at * b_stride + head, mask=living, other=0.0).to(tl.float32),
            tl.load(a_log + head).to(tl.float32),
            tl.load(dt_bias + head).to(tl.float32),
        )
        decay = tl.where(living, decay, 0.0)
        beta = tl.where(living, beta, 0.0)
        total = tl.cumsum(decay, axis=0)
        last = tl.sum(tl.where(token == CHUNK_TOKENS - 1, total, 0.0), axis=0)
        # Positive above the diagonal, where it could overflow.
        between = exponential(tl.minimum(total[:, None] - total[None, :], 0.0))
        system = tl.where(before, overlap * between * beta[:, None], 0.0)
        unit = inverse(system, PRECISION, CHUNK_TOKENS, LEVELS) * beta[None, :]
        seen = tl.where(before | (token[:, None] == token[None, :]), attention * between, 0.0)
        place = (slot.to(tl.int64) * heads + head) * CHUNK_TOKENS
        square = place * CHUNK_TOKENS + token[:, None] * CHUNK_TOKENS + token[None, :]
        tl.store(solved + square, unit.to(solved.dtype.element_ty))
        tl.store(scores + square, seen.to(scores.dtype.element_ty))
        line = factors + place * 5 + token
        tl.store(line, total)
        tl.store(line + CHUNK_TOKENS, exponential(total) * key_norm)
        tl.store(line + 2 * CHUNK_TOKENS, exponential(last - total) * key_norm)
        tl.store(line + 3 * CHUNK_TOKENS, exponential(total) * query_norm)
        tl.store(line + 4 * CHUNK_TOKENS, key_norm)


@triton.jit
def scan_kernel(
    q,
    k,
    v,
    solved,
    scores,
    factors,
    states,
    state_in,
    state_out,
    state_zero,
    query_start,
    context_lens,
    kept_start,
    kept_tokens,
    kept_rows,
    out,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    block_stride,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr,
    SPARE_SLOTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    KEEPS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """All chunks of one row, for some columns of one head's state."""
    row, head = tl.program_id(2), tl.program_id(1)
    heads = tl.num_programs(1)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    token, key = tl.arange(0, CHUNK_TOKENS), tl.arange(0, BLOCK_K)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    start, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if start == end:
        return
    target = tl.load(state_out + row).to(tl.int64)
    if target < 0:
        for first in range(start, end, CHUNK_TOKENS):
            at = first + token
            place = out + (at.to(tl.int64)[:, None] * heads + head) * VALUE_DIM + value[None, :]
            zero = tl.zeros((CHUNK_TOKENS, BLOCK_V), dtype=out.dtype.element_ty)
            tl.store(place, zero, mask=(at < end)[:, None] & in_value[None, :])
        return
    source = tl.load(state_in + row).to(tl.int64)
    reading = (source >= 0) & (tl.load(state_zero + row) == 0)
    inside = in_key[:, None] & in_value[None, :]
    at_state = head.to(tl.int64) * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    # A bound instead of a flag: the interpreter can't mask by a scalar.
    readable = (key < tl.where(reading, KEY_DIM, 0))[:, None] & in_value[None, :]
    state = tl.load(states + source * block_stride + at_state, mask=readable, other=0.0)
    state = state.to(tl.float32)
    kept, kept_end = 0, 0
    if KEEPS:
        kept, kept_end = tl.load(kept_start + row), tl.load(kept_start + row + 1)
    keys_at = k + head // GROUP * k_head_stride + key[None, :]
    queries_at = q + head // GROUP * q_head_stride + key[None, :]
    values_at = v + head * v_head_stride + value[None, :]
    slot = (start // CHUNK_TOKENS + SPARE_SLOTS * row).to(tl.int64)
    skipped = 0
    if ALIGNED:
        skipped = (tl.load(context_lens + row) - (end - start)) % CHUNK_TOKENS
    for index in range(tl.cdiv(end - start + skipped, CHUNK_TOKENS)):
        first = tl.maximum(start, start + index * CHUNK_TOKENS - skipped)
        living = token < tl.minimum(end, start + (index + 1) * CHUNK_TOKENS - skipped) - first
        at = first.to(tl.int64) + token
        mask = living[:, None] & in_key[None, :]
        keys = tl.load(keys_at + at[:, None] * k_stride, mask=mask, other=0.0)
        queries = tl.load(queries_at + at[:, None] * q_stride, mask=mask, other=0.0)
        mask = living[:, None] & in_value[None, :]
        values = tl.load(values_at + at[:, None] * v_stride, mask=mask, other=0.0).to(tl.float32)
        place = ((slot + index) * heads + head) * CHUNK_TOKENS
        square = place * CHUNK_TOKENS + token[:, None] * CHUNK_TOKENS + token[None, :]
        unit = tl.load(solved + square)
        seen = tl.load(scores + square)
        line = factors + place * 5 + token
        total = tl.load(line)
        key_factor = tl.load(line + CHUNK_TOKENS)
        update_factor = tl.load(line + 2 * CHUNK_TOKENS)
        query_factor = tl.load(line + 3 * CHUNK_TOKENS)
        narrow = state.to(keys.dtype)
        missing = values - key_factor[:, None] * dot(keys, narrow, UPCAST)
        fresh = dot(unit, missing.to(keys.dtype), UPCAST)
        result = dot(queries, narrow, UPCAST) * query_factor[:, None]
        result += dot(seen, fresh.to(keys.dtype), UPCAST)
        place_out = out + (at[:, None] * heads + head) * VALUE_DIM + value[None, :]
        tl.store(place_out, result.to(out.dtype.element_ty), mask=mask)
        if KEEPS:
            done = tl.sum(living.to(tl.int32), axis=0) + first - start
            while (kept < kept_end) and (tl.load(kept_tokens + kept, mask=kept < kept_end, other=0) <= done):
                count = tl.load(kept_tokens + kept) - (first - start)
                upto = tl.sum(tl.where(token == count - 1, total, 0.0), axis=0)
                share = exponential(tl.minimum(upto - total, 0.0)) * tl.load(line + 4 * CHUNK_TOKENS)
                share = tl.where(token < count, share, 0.0)
                added = dot(tl.trans(keys), (fresh * share[:, None]).to(keys.dtype), UPCAST)
                block = tl.load(kept_rows + kept).to(tl.int64)
                then = (state * exponential(upto) + added).to(states.dtype.element_ty)
                tl.store(states + block * block_stride + at_state, then, mask=inside)
                kept += 1
        last = tl.sum(tl.where(token == CHUNK_TOKENS - 1, total, 0.0), axis=0)
        added = dot(tl.trans(keys), (fresh * update_factor[:, None]).to(keys.dtype), UPCAST)
        state = state * exponential(last) + added
    tl.store(states + target * block_stride + at_state, state.to(states.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Prepared:
    """What `prepare_kernel` made of each chunk."""

    solved: Tensor
    scores: Tensor
    factors: Tensor

    @property
    def slots(self) -> int:
        """Chunks there is room for."""
        return self.solved.shape[0]


def prepare(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    query_start: Tensor,
    context_lens: Tensor | None,
    scale: float,
) -> Prepared:
    """Launch `prepare_kernel` for a batch with tokens and rows."""
    tokens, heads = a.shape
    key_heads, key_dim = k.shape[1:]
    rows = query_start.shape[0] - 1
    slots = tokens // CHUNK + SPARE * rows
    solved, scores = torch.empty((2, slots, heads, CHUNK, CHUNK), dtype=q.dtype, device=q.device).unbind()
    factors = torch.empty((slots, heads, FACTORS, CHUNK), dtype=torch.float32, device=q.device)
    prepare_kernel[(slots, key_heads)](
        q,
        k,
        a,
        b,
        a_log,
        dt_bias,
        query_start,
        query_start if context_lens is None else context_lens,
        solved,
        scores,
        factors,
        rows,
        heads,
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        a.stride(0),
        b.stride(0),
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        BLOCK_K=max(16, next_power_of_two(key_dim)),
        CHUNK_TOKENS=CHUNK,
        LEVELS=CHUNK.bit_length() - 1,
        SPARE_SLOTS=SPARE,
        ALIGNED=context_lens is not None,
        ROWS_PAD=rows_pad(rows),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED,
        num_warps=4,
    )
    return Prepared(solved, scores, factors)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    query_start: Tensor,
    context_lens: Tensor | None,
    max_query_len: int,
    scale: float,
    boundaries: Boundaries | None,
) -> Tensor:
    """See `quickturn_kernels.gated_delta_prefill`."""
    tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    rows = state_in.shape[0]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if tokens == 0 or rows == 0:
        return out
    if a.dim() == 3:
        return triton_recurrent.launch(
            q,
            k,
            v,
            a,
            b,
            a_log,
            dt_bias,
            states,
            state_in,
            state_out,
            state_zero,
            query_start,
            scale,
            boundaries,
        )
    made = prepare(q, k, a, b, a_log, dt_bias, query_start, context_lens, scale)
    block_k = max(16, next_power_of_two(key_dim))
    block_v = min(max(16, next_power_of_two(value_dim)), 32 if block_k > 64 else 64)
    kept = (query_start,) * 3
    if boundaries is not None:
        kept = (boundaries.row_start, boundaries.tokens, boundaries.rows)
    scan_kernel[(triton.cdiv(value_dim, block_v), heads, rows)](
        q,
        k,
        v,
        made.solved,
        made.scores,
        made.factors,
        states,
        state_in,
        state_out,
        state_zero.view(torch.uint8),
        query_start,
        query_start if context_lens is None else context_lens,
        *kept,
        out,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        states.stride(0),
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        CHUNK_TOKENS=CHUNK,
        SPARE_SLOTS=SPARE,
        ALIGNED=context_lens is not None,
        KEEPS=boundaries is not None,
        UPCAST=INTERPRETED,
        num_warps=4,
        num_stages=2,
    )
    return out
