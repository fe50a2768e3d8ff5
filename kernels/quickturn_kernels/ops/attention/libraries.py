"""FlashAttention 3 and 2 (Dao-AILab) behind the public ops, where they are installed.

Both take the cache as it lies, strided between blocks, with its tables. Version 2 wants blocks of a multiple
of 256 tokens; what a library doesn't take goes to the Triton tier. They rank above that tier and below this
package's own kernels. FlashInfer has no place here: its plan is made on the host from the lengths, for every
step anew, while a captured step must be replayed for any lengths.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quickturn_kernels.ops.attention import SAME, triton_decode, triton_prefill
from quickturn_kernels.platform import Requirement
from quickturn_kernels.registry import Priority, register

VERSION_2, VERSION_3 = "flash_attn", "flash_attn_interface"
PAGE_OF_VERSION_2 = 256
_OPTIONS: dict[str, Any] = {
    "dtypes": (torch.bfloat16, torch.float16),
    "traits": {"head_dim": range(8, 257, 8), "sinks": {False}, "cache": {SAME}},
    "priority": Priority.LIBRARY,
}


def sees(window: int) -> tuple[int, int]:
    """(left, right): how many keys before and behind its own a query sees, -1 for all."""
    return (window - 1, 0) if window > 0 else (-1, -1)


def decode_version_3(
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
    out = import_module(VERSION_3).flash_attn_with_kvcache(
        q[:, None],
        k_cache,
        v_cache,
        cache_seqlens=context_lens,
        page_table=block_tables,
        softmax_scale=scale,
        causal=True,
        window_size=sees(window),
        softcap=softcap,
    )
    return _without_padding(out[:, 0], context_lens)


def prefill_version_3(
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
    out = import_module(VERSION_3).flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=context_lens,
        page_table=block_tables,
        cu_seqlens_q=query_start,
        max_seqlen_q=max_query_len,
        softmax_scale=scale,
        causal=True,
        window_size=sees(window),
        softcap=softcap,
    )
    return _without_tail(out, query_start)


def decode_version_2(
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
    if k_cache.shape[1] % PAGE_OF_VERSION_2:
        rest = (scale, window, sinks, softcap, max_context_len)
        return triton_decode.paged_attention_decode(q, k_cache, v_cache, block_tables, context_lens, *rest)
    out = import_module(VERSION_2).flash_attn_with_kvcache(
        q[:, None],
        k_cache,
        v_cache,
        cache_seqlens=context_lens,
        block_table=block_tables,
        softmax_scale=scale,
        causal=True,
        window_size=sees(window),
        softcap=softcap,
    )
    return _without_padding(out[:, 0], context_lens)


def prefill_version_2(
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
    if k_cache.shape[1] % PAGE_OF_VERSION_2:
        rest = (query_start, context_lens, max_query_len, scale, window, sinks, softcap, max_context_len)
        return triton_prefill.paged_attention_prefill(q, k_cache, v_cache, block_tables, *rest)
    keys = torch.nn.functional.pad(context_lens.cumsum(0, dtype=torch.int32), (1, 0))
    out = import_module(VERSION_2).flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=query_start,
        cu_seqlens_k=keys,
        max_seqlen_q=max_query_len,
        max_seqlen_k=max_context_len,
        softmax_scale=scale,
        causal=True,
        window_size=sees(window),
        softcap=softcap,
        block_table=block_tables,
    )
    return _without_tail(out, query_start)


def _without_padding(out: Tensor, context_lens: Tensor) -> Tensor:
    """Zeros for rows without a context."""
    return out.masked_fill((context_lens == 0)[:, None, None], 0.0)


def _without_tail(out: Tensor, query_start: Tensor) -> Tensor:
    """Zeros for tokens past the last row."""
    token = torch.arange(out.shape[0], device=out.device)
    return out.masked_fill((token >= query_start[-1])[:, None, None], 0.0)


def register_installed() -> None:
    """Register what is installed, without importing it. Version 3 comes last: it is taken before 2."""
    if find_spec(VERSION_2) is not None:
        ampere = Requirement(device="cuda", min_capability=(8, 0))
        register("paged_attention_decode", name="flash_attn_2", platform=ampere, **_OPTIONS)(decode_version_2)
        register("paged_attention_prefill", name="flash_attn_2", platform=ampere, **_OPTIONS)(
            prefill_version_2
        )
    if find_spec(VERSION_3) is not None:
        hopper = Requirement(device="cuda", min_capability=(9, 0), max_capability=(9, 0))
        register("paged_attention_decode", name="flash_attn_3", platform=hopper, **_OPTIONS)(decode_version_3)
        register("paged_attention_prefill", name="flash_attn_3", platform=hopper, **_OPTIONS)(
            prefill_version_3
        )


register_installed()
