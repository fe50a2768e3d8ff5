"""Sampling, first part: the whole vocabulary is read, by as many programs as there are chunks."""

import triton
import triton.language as tl

from quickturn_kernels.ops.sampling import IN_PROMPT
from quickturn_kernels.ops.sampling.triton_common import (
    FAR,
    GREEDY_BELOW,
    LOG2_E,
    chunk_noise,
    chunk_weights,
    is_filtered,
)

_GENERATED = tl.constexpr(IN_PROMPT - 1)


@triton.jit
def scan_kernel(
    logits,
    adjusted,
    stats,
    best_tokens,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    presence,
    frequency,
    repetition,
    counts,
    count_rows,
    bias_ids,
    bias_values,
    bitmask,
    logits_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    seeds_stride,
    positions_stride,
    presence_stride,
    frequency_stride,
    repetition_stride,
    counts_stride,
    bias_ids_stride,
    bias_values_stride,
    bitmask_stride,
    vocabulary,
    num_bias,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BIAS_PAD: tl.constexpr,
    PENALTIES: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    BITMASK: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    FILTERS: tl.constexpr,
    RAW: tl.constexpr,
):
    """Penalties, bias and bitmask for one chunk of one row, and what the chunk holds.

    Writes the adjusted logits when anything adjusts them; the first token that has the largest logit, or, of
    a row that is drawn without filters, the largest logit / temperature + noise; and four floats of stats:
    the largest adjusted logit, +inf where a logit is NaN or infinite; of a row without filters the largest
    sum with the noise, else the sum of exp((logit - largest) / temperature); with RAW the raw logits' largest
    and their sum of exp(logit - largest).
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    value = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    bad = tl.max(((value != value) | (value == float("inf"))).to(tl.int32), axis=0)
    at = stats + (row * CHUNKS + chunk) * 4
    if RAW:
        raw_top = tl.max(value, axis=0)
        raw_base = tl.where(raw_top > float("-inf"), raw_top, 0.0)
        tl.store(at + 2, raw_top)
        tl.store(at + 3, tl.sum(tl.exp2((value - raw_base) * LOG2_E), axis=0))
    if PENALTIES:
        count_row = row
        if COUNT_ROWS:
            count_row = tl.load(count_rows + row).to(tl.int64)
        seen = tl.load(counts + count_row * counts_stride + token, mask=inside, other=0)
        repeat = tl.load(repetition + row * repetition_stride)
        value = tl.where(seen != 0, tl.where(value > 0.0, value / repeat, value * repeat), value)
        generated = seen & _GENERATED
        value -= tl.load(frequency + row * frequency_stride) * generated.to(tl.float32)
        value -= tl.where(generated > 0, tl.load(presence + row * presence_stride), 0.0)
    if BITMASK:
        word = tl.load(bitmask + row * bitmask_stride + token // 32, mask=inside, other=0)
        value = tl.where(((word >> (token % 32)) & 1) != 0, value, float("-inf"))
    target = adjusted + row * vocabulary + token
    if PENALTIES or BITMASK or BIAS_PAD > 0:
        tl.store(target, value, mask=inside)
    if BIAS_PAD > 0:
        # Few tokens have a bias: added in memory, between barriers, instead of searched for every token.
        tl.debug_barrier()
        entry = tl.arange(0, BIAS_PAD)
        biased = tl.load(bias_ids + row * bias_ids_stride + entry, mask=entry < num_bias, other=-1)
        mine = (biased >= chunk * CHUNK) & (biased < chunk * CHUNK + CHUNK)
        place = adjusted + row * vocabulary + biased
        amount = tl.load(bias_values + row * bias_values_stride + entry, mask=mine, other=0.0)
        changed = tl.load(place, mask=mine, other=0.0) + amount
        tl.store(place, changed, mask=mine)
        tl.debug_barrier()
        value = tl.load(target, mask=inside, other=float("-inf"))
    top = tl.max(value, axis=0)
    tl.store(at, tl.where(bad != 0, float("inf"), top))
    first = tl.min(tl.where(value == top, token, FAR), axis=0)
    if not ALL_GREEDY:
        heat = tl.load(temperature + row * temperature_stride)
        filtered = False
        if FILTERS:
            k = tl.load(top_k + row * top_k_stride)
            p = tl.load(top_p + row * top_p_stride)
            m = tl.load(min_p + row * min_p_stride)
            filtered = is_filtered(k, p, m, vocabulary)
        if heat >= GREEDY_BELOW:
            if filtered:
                base = tl.where(top > float("-inf"), top, 0.0)
                tl.store(at + 1, tl.sum(tl.exp2((value - base) * (LOG2_E / heat)), axis=0))
            else:
                seed = tl.load(seeds + row * seeds_stride)
                position = tl.load(positions + row * positions_stride)
                score = value / heat + chunk_noise(seed, position, chunk, CHUNK)
                highest = tl.max(score, axis=0)
                tl.store(at + 1, highest)
                first = tl.min(tl.where(score == highest, token, FAR), axis=0)
    tl.store(best_tokens + row * CHUNKS + chunk, first)


@triton.jit
def candidates_kernel(
    values,
    stats,
    candidate_counts,
    candidate_values,
    candidate_tokens,
    temperature,
    top_k,
    top_p,
    min_p,
    values_stride,
    temperature_stride,
    top_k_stride,
    top_p_stride,
    min_p_stride,
    vocabulary,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    """Keep, at the front of one chunk's part of the workspace, the tokens of the chunk that a filter might
    keep.

    No token under `least` can be kept: top-k of at most as many tokens as there are chunks keeps none under
    the k-th largest of the chunks' maxima; top-p none of those that weigh less than 1 - top_p together even
    if all V weighed as much as the heaviest of them; min-p none under its own bound, but those count for
    top-p after top-k.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    heat = tl.load(temperature + row * temperature_stride)
    k = tl.load(top_k + row * top_k_stride)
    p = tl.load(top_p + row * top_p_stride)
    m = tl.load(min_p + row * min_p_stride)
    by_k = (k > 0) & (k < vocabulary)
    if (heat >= GREEDY_BELOW) & is_filtered(k, p, m, vocabulary):
        tops, best, sums = chunk_weights(stats, row, LOG2_E / heat, CHUNKS, CHUNKS_PAD)
        least = best * 0.0 + float("-inf")
        if by_k:
            ranks = tl.sum((tops[None, :] >= tops[:, None]).to(tl.int32), axis=1)
            least = tl.max(tl.where((ranks >= k) & (k <= CHUNKS), tops, float("-inf")), axis=0)
        else:
            if m > 0.0:
                least = best + heat * tl.log(m)
        if p < 1.0:
            whole = tl.where(by_k, 1.0, tl.sum(sums, axis=0))
            # Half, so that rounding cannot drop a token that counts.
            share = 0.5 * (1.0 - p) * whole / vocabulary
            least = tl.maximum(least, best + heat * tl.log(share))
        top = tl.load(stats + (row * CHUNKS + chunk) * 4)
        found = 0
        if (top >= least) & (best < float("inf")):
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            value = tl.load(
                values + row * values_stride + token, mask=token < vocabulary, other=float("-inf")
            )
            value = value.to(tl.float32)
            kept = (value >= least) & (value > float("-inf"))
            place = tl.cumsum(kept.to(tl.int32), axis=0) - 1
            found = tl.sum(kept.to(tl.int32), axis=0)
            front = row * (CHUNKS * CHUNK) + chunk * CHUNK
            tl.store(candidate_values + front + place, value, mask=kept)
            tl.store(candidate_tokens + front + place, token, mask=kept)
        tl.store(candidate_counts + row * CHUNKS + chunk, found)
