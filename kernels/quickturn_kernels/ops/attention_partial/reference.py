"""Partial attention and its merging in plain PyTorch."""

import torch
from torch import Tensor

from quickturn_kernels.ops.attention.reference import gather
from quickturn_kernels.registry import Priority, register


@register("partial_attention_decode", name="reference", priority=Priority.REFERENCE)
def partial_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    softcap: float,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.partial_attention_decode`."""
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    out = torch.zeros((rows, heads, dim + 1), dtype=torch.float32, device=q.device)
    out[..., dim] = float("-inf")
    for row, context in enumerate(context_lens.tolist()):
        if context == 0:
            continue
        keys, values = gather(k_cache, v_cache, block_tables[row], context)
        grouped = q[row].float().view(kv_heads, heads // kv_heads, dim)
        scores = grouped @ keys.transpose(-1, -2) * scale
        if softcap > 0.0:
            scores = torch.tanh(scores / softcap) * softcap
        out[row, :, :dim] = (scores.softmax(-1) @ values).view(heads, dim)
        out[row, :, dim] = scores.logsumexp(-1).view(heads)
    return out


@register("merge_attention", name="reference", priority=Priority.REFERENCE)
def merge_attention(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `quickturn_kernels.merge_attention`."""
    results, logs = parts[..., :-1], parts[..., -1]
    top = logs.amax(0) if sinks is None else torch.maximum(logs.amax(0), sinks.float())
    # A row without keys weighs nothing: exp(-inf - 0).
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)
    total = torch.zeros_like(top) if sinks is None else torch.exp(sinks.float() - top)
    merged = torch.zeros_like(results[0])
    for result, log in zip(results, logs, strict=True):
        weight = torch.exp(log - top)
        merged += result * weight[..., None]
        total = total + weight
    return (merged / torch.where(total > 0.0, total, 1.0)[..., None]).to(dtype)
