"""Paged attention through the compiled CPU kernels."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import (
    AVAILABLE,
    CODES,
    MAX_HEAD_DIM,
    address,
    heads_of,
    paged_cache,
    register_native,
)
from quickturn_kernels.ops.attention import SAME

if AVAILABLE:
    from quickturn_kernels import _cpu

_TRAITS = {"head_dim": range(1, MAX_HEAD_DIM + 1), "cache": {SAME}}


@register_native("paged_attention_decode", traits=_TRAITS)
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
    q = heads_of(q)
    rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _cpu.attention_decode(
        CODES[q.dtype],
        q.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        heads,
        paged_cache(k_cache, v_cache),
        block_tables.data_ptr(),
        block_tables.stride(0),
        context_lens.data_ptr(),
        rows,
        scale,
        softcap,
        window,
        address(sinks),
    )
    return out


@register_native("paged_attention_prefill", traits=_TRAITS)
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
    q = heads_of(q)
    tokens, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _cpu.attention_prefill(
        CODES[q.dtype],
        q.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        heads,
        paged_cache(k_cache, v_cache),
        block_tables.data_ptr(),
        block_tables.stride(0),
        query_start.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
        scale,
        softcap,
        window,
        address(sinks),
        tokens,
        tokens * max_context_len * heads * head_dim // 16,
    )
    return out
