"""Attention of one step's queries over the paged cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from quickturn_kernels.registry import Op, define

_Decode = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, float, int, Tensor | None, float, int],
    Tensor,
]
_Prefill = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float, int, Tensor | None, float, int],
    Tensor,
]
_TRAITS = ("head_dim", "window", "sinks", "softcap", "cache")
_DECODE: Op[_Decode] = define("paged_attention_decode", *_TRAITS)
_PREFILL: Op[_Prefill] = define("paged_attention_prefill", *_TRAITS)

SAME, FP8 = "same", "fp8"
"""The trait "cache": keys and values are of q's dtype, or e4m3. An implementation that doesn't read e4m3 says
so."""


def cache_class(cache: Tensor) -> str:
    """The trait "cache" of a call."""
    return FP8 if cache.dtype == torch.float8_e4m3fn else SAME


def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_context_len: int,
) -> Tensor:
    """Attention of one query token a row over all keys of its row.

    q: [R, Hq, D], the last dim contiguous. k_cache, v_cache: [num_blocks, block_tokens, Hkv, D], strided
    between blocks and tokens; query head h reads kv head `h // (Hq // Hkv)`. block_tables: [R, max_blocks]
    int32; entries past a row's context are never read. context_lens: [R] int32, keys visible, this step's
    token included; 0 marks a padding row, whose output is zeros. scale multiplies q.k; softcap > 0 then
    squashes the score to `softcap * tanh(score / softcap)`. window > 0 sees the last `window` keys only
    (the query's own included). sinks: [Hq], one more logit a head in the softmax's denominator. Caches may be
    float8_e4m3fn beside any q; an element of theirs is worth `e4m3 * k_scale` or `e4m3 * v_scale`.
    max_context_len: a host bound on context_lens; nothing else may depend on the lengths, so that a CUDA
    graph can be replayed for any. Returns a new contiguous [R, Hq, D] of q.dtype; softmax in float32.
    """
    key = (
        q.device,
        q.dtype,
        q.shape[2],
        window > 0,
        sinks is not None,
        softcap > 0.0,
        cache_class(k_cache),
    )
    function = _DECODE.table.get(key)
    if function is None:
        function = _DECODE.bind(*key)
    out = function(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale * k_scale,
        window,
        sinks,
        softcap,
        max_context_len,
    )
    return out if v_scale == 1.0 else out.mul_(v_scale)


def paged_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    max_context_len: int,
) -> Tensor:
    """Causal attention of ragged chunks of query tokens over the paged cache, which already holds their keys.

    q: [T, Hq, D]; row r has the tokens query_start[r] to query_start[r + 1] - 1 (query_start: [R + 1]
    int32, from 0; tokens past the last are padding, their output is zeros). context_lens: [R] int32, keys
    visible to the row's last token. Query j of row r stands at `p = context_lens[r] - query_len[r] + j` and
    sees the keys <= p, and > p - window where window > 0. max_query_len, max_context_len: host bounds. The
    rest as in `paged_attention_decode`. Returns a new [T, Hq, D].
    """
    key = (
        q.device,
        q.dtype,
        q.shape[2],
        window > 0,
        sinks is not None,
        softcap > 0.0,
        cache_class(k_cache),
    )
    function = _PREFILL.table.get(key)
    if function is None:
        function = _PREFILL.bind(*key)
    out = function(
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start,
        context_lens,
        max_query_len,
        scale * k_scale,
        window,
        sinks,
        softcap,
        max_context_len,
    )
    return out if v_scale == 1.0 else out.mul_(v_scale)
