"""Sampling, second part: one program a row chooses the token."""

import triton
import triton.language as tl

from quickturn_kernels.ops.sampling.triton_common import FAR, GREEDY_BELOW, LOG2_E, chunk_weights, order_key


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
    values,
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
    values_stride,
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

    firsts = tl.load(best_tokens + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=FAR)
    token = tl.min(tl.where(tops == best, firsts, FAR), axis=0)
    if not ALL_GREEDY:
        usable = (best > float("-inf")) & (best < float("inf"))
        if usable & (heat >= GREEDY_BELOW):
            seed = tl.load(seeds + row * seeds_stride)
            position = tl.load(positions + row * positions_stride)
            low_word = (position & 0xFFFFFFFF).to(tl.uint32)
            high_word = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
            word, _w1, _w2, _w3 = tl.philox(seed, low_word, high_word, low_word * 0, low_word * 0)
            uniform = (word >> 8).to(tl.float32) * (1.0 / 16777216.0)
            filtered = False
            if FILTERS:
                k = tl.load(top_k + row * top_k_stride)
                p = tl.load(top_p + row * top_p_stride)
                m = tl.load(min_p + row * min_p_stride)
                by_k = (k > 0) & (k < vocabulary)
                filtered = by_k | (p < 1.0) | (m > 0.0)
                if filtered:
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
                    target = uniform * _mass(row_values, count, cut, best, inverse, BLOCK)
                    running = 0.0
                    chosen = FAR
                    last = -1
                    start = 0
                    while (start < count) & (chosen == FAR):
                        place = start + tl.arange(0, BLOCK)
                        value = tl.load(row_values + place, mask=place < count, other=float("-inf"))
                        at_token = tl.load(row_tokens + place, mask=place < count, other=-1)
                        kept = (place < count) & (order_key(value) >= cut)
                        weight = tl.where(kept, tl.exp2((value - best) * inverse), 0.0)
                        passed = kept & (running + tl.cumsum(weight, axis=0) > target)
                        chosen = tl.min(tl.where(passed, at_token, FAR), axis=0)
                        last = tl.maximum(last, tl.max(tl.where(kept, at_token, -1), axis=0))
                        running += tl.sum(weight, axis=0)
                        start += BLOCK
                    # Rounding may leave the sum a hair short of its target.
                    token = tl.where(chosen == FAR, last, chosen)
            if not filtered:
                target = uniform * tl.sum(sums, axis=0)
                passed = (tl.cumsum(sums, axis=0) > target) & (sums > 0.0)
                home = tl.min(tl.where(passed, chunk, FAR), axis=0)
                home = tl.where(home == FAR, tl.max(tl.where(sums > 0.0, chunk, 0), axis=0), home)
                target -= tl.sum(tl.where(chunk < home, sums, 0.0), axis=0)
                at_token = home * CHUNK + tl.arange(0, CHUNK)
                inside = at_token < vocabulary
                value = tl.load(values + row * values_stride + at_token, mask=inside, other=float("-inf"))
                weight = tl.exp2((value.to(tl.float32) - best) * inverse)
                passed = (tl.cumsum(weight, axis=0) > target) & (weight > 0.0)
                chosen = tl.min(tl.where(passed, at_token, FAR), axis=0)
                last = tl.max(tl.where(weight > 0.0, at_token, -1), axis=0)
                token = tl.where(chosen == FAR, last, chosen)
    usable_token = tl.where((best > float("-inf")) & (best < float("inf")), token, -1)
    tl.store(tokens + row, usable_token.to(tl.int64))
