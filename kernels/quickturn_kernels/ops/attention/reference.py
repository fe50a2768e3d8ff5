"""Paged attention in plain PyTorch: a loop over rows, scores in float32."""

import torch
from torch import Tensor

from quickturn_kernels.registry import Priority, register

SCORE_ELEMENTS = 1 << 25
"""Bound on the scores held at once (128 MiB): longer chunks of queries are cut."""


@register("paged_attention_decode", name="reference", priority=Priority.REFERENCE)
def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.paged_attention_decode`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, context in enumerate(context_lens.tolist()):
        if context > 0:
            keys, values = gather(k_cache, v_cache, block_tables[row], context)
            out[row] = _attend(q[row : row + 1], keys, values, context - 1, scale, window, sinks, softcap)[0]
    return out


@register("paged_attention_prefill", name="reference", priority=Priority.REFERENCE)
def paged_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.paged_attention_prefill`."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = query_start.tolist()
    for row, context in enumerate(context_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end or context == 0:
            continue
        keys, values = gather(k_cache, v_cache, block_tables[row], context)
        step = max(1, SCORE_ELEMENTS // (q.shape[1] * context))
        for first in range(start, end, step):
            part = q[first : min(first + step, end)]
            position = context - (end - first)
            out[first : first + part.shape[0]] = _attend(
                part, keys, values, position, scale, window, sinks, softcap
            )
    return out


def gather(k_cache: Tensor, v_cache: Tensor, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """The row's keys and values as float32 [Hkv, context, D]."""
    block_tokens = k_cache.shape[1]
    blocks = table[: -(-context // block_tokens)].long()
    keys, values = (
        cache[blocks].flatten(0, 1)[:context].float().transpose(0, 1) for cache in (k_cache, v_cache)
    )
    return keys, values


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """Queries [L, Hq, D] at positions `position`... over keys and values [Hkv, N, D]; returns [L, Hq, D] of
    q.dtype.
    """
    length, heads, dim = q.shape
    kv_heads, count, _ = keys.shape
    grouped = q.float().reshape(length, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    scores = grouped @ keys[:, None].transpose(-1, -2) * scale
    if softcap > 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(position, position + length, device=q.device)[:, None]
    key_at = torch.arange(count, device=q.device)
    hidden = key_at > at
    if window > 0:
        hidden |= key_at <= at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float().reshape(kv_heads, heads // kv_heads, 1, 1).expand(-1, -1, length, 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1)[..., :count]
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(length, heads, dim).to(q.dtype)
