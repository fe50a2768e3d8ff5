"""Sampling on the CPU: greedy rows without adjustments need no more than the largest logit."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, register_native, rows_of
from quickturn_kernels.ops.sampling import Sampled, SamplingTensors, reference

if AVAILABLE:
    from quickturn_kernels import _cpu


@register_native("sample")
def sample(logits: Tensor, params: SamplingTensors, num_logprobs: int | None) -> Sampled:
    """See `quickturn_kernels.sample`."""
    plain = params.counts is None and params.bias_ids is None and params.bitmask is None
    if not (plain and params.all_greedy):
        return reference.sample(logits, params, num_logprobs)
    logits = rows_of(logits)
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    _cpu.argmax(CODES[logits.dtype], logits.data_ptr(), tokens.data_ptr(), rows, size, logits.stride(0))
    return reference.with_logprobs(logits, tokens, num_logprobs)
