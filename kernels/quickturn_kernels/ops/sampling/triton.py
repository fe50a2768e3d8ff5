"""Sampling in Triton without a sort.

Two or three launches: the vocabulary is scanned in chunks by many programs (penalties, maxima, sums, and the
draw within the chunk where no filter is on); where one is on, each chunk keeps the tokens that could survive
it, usually few; one program a row then finds the cuts of top-k, top-p and min-p among those by bisection, and
draws from what is left, or takes the best of the chunks' own draws.
"""

import torch
import triton
from torch import Tensor

from quickturn_kernels.ops.sampling import Sampled, SamplingTensors
from quickturn_kernels.ops.sampling.triton_choose import choose_kernel
from quickturn_kernels.ops.sampling.triton_common import CHUNK
from quickturn_kernels.ops.sampling.triton_scan import candidates_kernel, scan_kernel
from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, INTERPRETED, next_power_of_two

INTERPRETED_CHUNK = 256
"""Small vocabularies must have several chunks too when tests interpret the kernels."""


@register("sample", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def sample(logits: Tensor, params: SamplingTensors, num_logprobs: int | None) -> Sampled:
    """See `quickturn_kernels.sample`."""
    rows, vocabulary = logits.shape
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    raw = num_logprobs is not None
    normalisers = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return _with_logprobs(logits, tokens, normalisers, num_logprobs)
    chunk = INTERPRETED_CHUNK if INTERPRETED else CHUNK
    chunks = triton.cdiv(vocabulary, chunk)
    # Triton 3.6 can't compile `choose_kernel` with vectors of one element.
    chunks_pad = max(2, next_power_of_two(chunks))
    stats = torch.empty((rows, chunks, 4), dtype=torch.float32, device=device)
    best_tokens = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    filters = not (params.no_filters or params.all_greedy)
    values = _scan(logits, params, stats, best_tokens, chunk, chunks, filters, raw)
    counts = torch.empty((rows, chunks if filters else 0), dtype=torch.int32, device=device)
    width = chunks * chunk if filters else 0
    candidate_values = torch.empty((rows, width), dtype=torch.float32, device=device)
    candidate_tokens = torch.empty((rows, width), dtype=torch.int32, device=device)
    if filters:
        candidates_kernel[(rows, chunks)](
            values,
            stats,
            counts,
            candidate_values,
            candidate_tokens,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            values.stride(0),
            params.temperature.stride(0),
            params.top_k.stride(0),
            params.top_p.stride(0),
            params.min_p.stride(0),
            vocabulary,
            CHUNK=chunk,
            CHUNKS=chunks,
            CHUNKS_PAD=chunks_pad,
            num_warps=8,
        )
    choose_kernel[(rows,)](
        stats,
        best_tokens,
        counts,
        candidate_values,
        candidate_tokens,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seeds,
        params.positions,
        tokens,
        normalisers,
        params.temperature.stride(0),
        params.top_k.stride(0),
        params.top_p.stride(0),
        params.min_p.stride(0),
        params.seeds.stride(0),
        params.positions.stride(0),
        vocabulary,
        CHUNK=chunk,
        CHUNKS=chunks,
        CHUNKS_PAD=chunks_pad,
        BLOCK=chunk,
        ALL_GREEDY=params.all_greedy,
        FILTERS=filters,
        RAW=raw,
        num_warps=8,
    )
    return _with_logprobs(logits, tokens, normalisers, num_logprobs)


def _scan(
    logits: Tensor,
    params: SamplingTensors,
    stats: Tensor,
    best_tokens: Tensor,
    chunk: int,
    chunks: int,
    filters: bool,
    raw: bool,
) -> Tensor:
    """Launch the scan; returns the adjusted logits [R, V] float32, or the logits themselves when nothing
    adjusts them.
    """
    rows, vocabulary = logits.shape
    bias = 0 if params.bias_ids is None else params.bias_ids.shape[1]
    penalties, masked = params.counts is not None, params.bitmask is not None
    adjusted = logits
    if penalties or masked or bias > 0:
        adjusted = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    scan_kernel[(rows, chunks)](
        logits,
        adjusted,
        stats,
        best_tokens,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seeds,
        params.positions,
        params.presence,
        params.frequency,
        params.repetition,
        params.counts,
        None if params.count_rows is None else params.count_rows.contiguous(),
        params.bias_ids,
        params.bias_values,
        params.bitmask,
        logits.stride(0),
        params.temperature.stride(0),
        params.top_k.stride(0),
        params.top_p.stride(0),
        params.min_p.stride(0),
        params.seeds.stride(0),
        params.positions.stride(0),
        *(
            0 if tensor is None else tensor.stride(0)
            for tensor in (
                params.presence,
                params.frequency,
                params.repetition,
                params.counts,
                params.bias_ids,
                params.bias_values,
                params.bitmask,
            )
        ),
        vocabulary,
        bias,
        CHUNK=chunk,
        CHUNKS=chunks,
        BIAS_PAD=next_power_of_two(bias) if bias > 0 else 0,
        PENALTIES=penalties,
        COUNT_ROWS=params.count_rows is not None,
        BITMASK=masked,
        ALL_GREEDY=params.all_greedy,
        FILTERS=filters,
        RAW=raw,
        num_warps=8,
    )
    return adjusted


def _with_logprobs(logits: Tensor, tokens: Tensor, normalisers: Tensor, num_logprobs: int | None) -> Sampled:
    if num_logprobs is None:
        return Sampled(tokens)
    chosen = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0].float() - normalisers
    if num_logprobs == 0:
        return Sampled(tokens, chosen)
    top = logits.topk(num_logprobs, dim=-1)
    return Sampled(tokens, chosen, top.indices, top.values.float() - normalisers[:, None])
