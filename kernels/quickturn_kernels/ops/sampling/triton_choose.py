"""Sampling, second part: one program a row chooses the token."""

import triton
import triton.language as tl

from quickturn_kernels.ops.sampling.triton_common import (
    FAR,
    GREEDY_BELOW,
    LOG2_E,
    chunk_weights,
    is_filtered,
    order_key,
    token_noise,
)


@triton.jit
def _gather(ends, values, tokens, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Move the row's candidates, in place and in order, from the fronts of the chunks to the front of the
    row.

    `ends` points at the row's counts, which become running sums; values and tokens point at the row.
    Returns how many candidates there are.
    """
    GATHER: tl.constexpr = 1024
    chunk = tl.arange(0, CHUNKS_PAD)
    counts = tl.load(ends + chunk, mask=chunk < CHUNKS, other=0)
    tl.store(ends + chunk, tl.cumsum(counts, axis=0), mask=chunk < CHUNKS)
    tl.debug_barrier()
    total = tl.sum(counts, axis=0)
    for start in range(0, total, GATHER):
        place = start + tl.arange(0, GATHER)
        # Binary search: the chunk that a place comes from is the number of chunks that end at or before it.
        home = place * 0
        step = CHUNKS_PAD
        while step > 1:
            step = step // 2
            probe = home + step - 1
            end = tl.load(ends + probe, mask=probe < CHUNKS, other=FAR)
            home = tl.where(end <= place, home + step, home)
        inside = place < total
        before = tl.load(ends + home - 1, mask=inside & (home > 0), other=0)
        source = home * CHUNK + place - before
        value = tl.load(values + source, mask=inside)
        token = tl.load(tokens + source, mask=inside)
        # Sources never lie before their places, but may be places of the same round.
        tl.debug_barrier()
        tl.store(values + place, value, mask=inside)
        tl.store(tokens + place, token, mask=inside)
    tl.debug_barrier()
    return total


@triton.jit
def _mass(values, count, cut, best, inverse, BLOCK: tl.constexpr):
    """Weight of the candidates with key >= cut."""
    summed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(values + place, mask=place < count, other=float("-inf"))
        summed += tl.where(order_key(value) >= cut, tl.exp2((value - best) * inverse), 0.0)
    return tl.sum(summed, axis=0)


@triton.jit
def _cut(values, count, low, best, inverse, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that the candidates with keys >= it number, or weigh, at least `goal`; `low` if
    none is.

    Bisection between keys, at most 32 rounds; each round's bounds move to the next candidate, so that it
    usually ends in far fewer.
    """
    high = order_key(best) + 1
    while high > low + 1:
        middle = (low & high) + ((low ^ high) >> 1)
        measure = tl.zeros([BLOCK], tl.float32)
        above = tl.full([BLOCK], FAR, tl.int32)
        below = tl.full([BLOCK], -FAR, tl.int32)
        for start in range(0, count, BLOCK):
            place = start + tl.arange(0, BLOCK)
            value = tl.load(values + place, mask=place < count, other=float("-inf"))
            key = order_key(value)
            reached = key >= middle
            if BY_MASS:
                measure += tl.where(reached, tl.exp2((value - best) * inverse), 0.0)
            else:
                measure += tl.where(reached, 1.0, 0.0)
            above = tl.minimum(above, tl.where(reached, key, FAR))
            below = tl.maximum(below, tl.where(reached, -FAR, key))
        enough = tl.sum(measure, axis=0) >= goal
        low = tl.where(enough, tl.min(above, axis=0), low)
        high = tl.where(enough, high, tl.maximum(tl.max(below, axis=0), low) + 1)
    return low


@triton.jit
def choose_kernel(
    stats,
    best_tokens,
    candidate_counts,
    candidate_values,
    candidate_tokens,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    normalisers,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    seeds_stride,
    positions_stride,
    vocabulary,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    FILTERS: tl.constexpr,
    RAW: tl.constexpr,
):
    """The token of one row, and with RAW the log of the sum of exp of its raw logits."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS_PAD)
    heat = tl.load(temperature + row * temperature_stride)
    inverse = LOG2_E / tl.maximum(heat, GREEDY_BELOW)
    tops, best, sums = chunk_weights(stats, row, inverse, CHUNKS, CHUNKS_PAD)
    if RAW:
        at = stats + (row * CHUNKS + chunk) * 4 + 2
        raw_tops = tl.load(at, mask=chunk < CHUNKS, other=float("-inf"))
        raw_sums = tl.load(at + 1, mask=chunk < CHUNKS, other=0.0)
        raw_best = tl.max(raw_tops, axis=0)
        weights = tl.where(raw_tops > float("-inf"), tl.exp2((raw_tops - raw_best) * LOG2_E), 0.0)
        tl.store(normalisers + row, raw_best + tl.log(tl.sum(raw_sums * weights, axis=0)))

    # Of a row that is drawn without filters, the scan left scores and their tokens here.
    by_chunk = tops
    usable = (best > float("-inf")) & (best < float("inf"))
    filtered = False
    if not ALL_GREEDY:
        drawn = heat >= GREEDY_BELOW
        if FILTERS:
            k = tl.load(top_k + row * top_k_stride)
            p = tl.load(top_p + row * top_p_stride)
            m = tl.load(min_p + row * min_p_stride)
            filtered = drawn & is_filtered(k, p, m, vocabulary)
        scores = tl.load(stats + (row * CHUNKS + chunk) * 4 + 1, mask=chunk < CHUNKS, other=float("-inf"))
        by_chunk = tl.where(drawn, scores, tops)
    firsts = tl.load(best_tokens + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=FAR)
    token = tl.min(tl.where(by_chunk == tl.max(by_chunk, axis=0), firsts, FAR), axis=0)
    if FILTERS:
        by_k = (k > 0) & (k < vocabulary)
        if usable & filtered:
            row_values = candidate_values + row * (CHUNKS * CHUNK)
            row_tokens = candidate_tokens + row * (CHUNKS * CHUNK)
            ends = candidate_counts + row * CHUNKS
            count = _gather(ends, row_values, row_tokens, CHUNKS, CHUNKS_PAD, CHUNK)
            cut = order_key(best * 0.0 + float("-inf"))
            whole = tl.sum(sums, axis=0)
            if by_k:
                cut = _cut(row_values, count, cut, best, inverse, k.to(tl.float32), False, BLOCK)
                whole = _mass(row_values, count, cut, best, inverse, BLOCK)
            if p < 1.0:
                goal = tl.maximum(p * whole, 1e-30)
                cut = _cut(row_values, count, cut, best, inverse, goal, True, BLOCK)
            if m > 0.0:
                cut = tl.maximum(cut, order_key(best + heat * tl.log(m)))
            seed = tl.load(seeds + row * seeds_stride)
            position = tl.load(positions + row * positions_stride)
            highest = best * 0.0 + float("-inf")
            for start in range(0, count, BLOCK):
                place = start + tl.arange(0, BLOCK)
                value = tl.load(row_values + place, mask=place < count, other=float("-inf"))
                at_token = tl.load(row_tokens + place, mask=place < count, other=0)
                score = value / heat + token_noise(seed, position, at_token)
                score = tl.where((place < count) & (order_key(value) >= cut), score, float("-inf"))
                top = tl.max(score, axis=0)
                if top > highest:
                    token = tl.min(tl.where(score == top, at_token, FAR), axis=0)
                    highest = top
    tl.store(tokens + row, tl.where(usable, token, -1).to(tl.int64))
