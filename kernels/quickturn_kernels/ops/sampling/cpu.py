"""Sampling on the CPU: penalties, bias and bitmask in PyTorch, the choice in one pass over each row."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, address, register_native, rows_of
from quickturn_kernels.ops.sampling import Sampled, SamplingTensors, reference

if AVAILABLE:
    from quickturn_kernels import _cpu


@register_native("sample")
def sample(logits: Tensor, params: SamplingTensors, num_logprobs: int | None) -> Sampled:
    """See `quickturn_kernels.sample`."""
    plain = params.counts is None and params.bias_ids is None and params.bitmask is None
    values = rows_of(logits if plain else reference.adjust(logits, params))
    filters = not (params.all_greedy or params.no_filters)
    if filters:
        values = values.float()
    rows, size = values.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    if params.all_greedy:
        _cpu.argmax(CODES[values.dtype], values.data_ptr(), tokens.data_ptr(), rows, size, values.stride(0))
    else:
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        given = {name: getattr(params, name).contiguous() for name in names}
        top_k, top_p, min_p = (address(given[name]) if filters else 0 for name in names[1:4])
        _cpu.draw(
            CODES[values.dtype],
            values.data_ptr(),
            rows,
            size,
            values.stride(0),
            given["temperature"].data_ptr(),
            top_k,
            top_p,
            min_p,
            given["seeds"].data_ptr(),
            given["positions"].data_ptr(),
            tokens.data_ptr(),
        )
    if not plain:
        # A bad logit may hide behind a bias or under the mask.
        tokens = tokens.where(torch.isfinite(logits.amax(dim=-1)), -1)
    return reference.with_logprobs(logits, tokens, num_logprobs)
