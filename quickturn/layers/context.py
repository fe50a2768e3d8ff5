"""Attention over a cache whose tokens several ranks share out: of every block each holds an equal part, so
that a context of any length is shared out evenly, and block ids are the same everywhere.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from quickturn_kernels import (
    merge_attention,
    paged_attention_prefill,
    partial_attention_decode,
    rotary_cache_write,
)

from quickturn.cache.views import LayerCache
from quickturn.layers.attention import Attention
from quickturn.layers.forward import ForwardBatch, OwnTokens

Gather = Callable[[torch.Tensor], torch.Tensor]
"""`[...] -> [parts, ...]`: what each rank that shares the tokens gives, in the order of their parts."""


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Part `part` of `parts` of every block's tokens."""

    part: int
    parts: int
    gather: Gather


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """`attention`, without a window, over a cache of which this rank holds a share. Every rank has the
    queries, keys and values of all the step's tokens, and gets the same output.

    A decode row's keys stay where they are: each rank attends to its own, and results meet. A prompt's
    queries see keys that are brought together first.
    """

    attention: Attention
    share: TokenShare

    def __call__(self, qkv: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """As `Attention`."""
        q, k, v = self.attention.split(qkv)
        cache = batch.keys_and_values(self.attention.layer)
        own = batch.own_tokens(cache.group, cache.k.shape[1], self.share.part, self.share.parts)
        self._write(q, k, v, batch, cache, own)
        n = batch.num_decode
        outputs = []
        if batch.decode is not None:
            outputs.append(self._decode(q[:n], batch, cache, own))
        if batch.prefill is not None:
            outputs.append(self._prefill(q[n:], batch, cache))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.attention.gate(out.view(qkv.shape[0], -1), qkv)

    def _write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        own: OwnTokens,
    ) -> None:
        """Keys and values of the tokens that belong here to the cache; all queries are rotated, for which the
        op wants a place for their keys, too.
        """
        attention = self.attention
        tokens, heads, dim = k.shape
        aside = k.new_empty((2, tokens, 1, heads, dim))
        unused = q.new_zeros((tokens, 1, dim))
        for queries, keys, values, slots in (
            (q, aside[0], aside[1], own.lines),
            (unused, cache.k, cache.v, own.slots),
        ):
            rotary_cache_write(
                queries,
                k,
                v,
                batch.positions,
                attention.cos_sin,
                keys,
                values,
                slots,
                q_weight=attention.q_norm,
                k_weight=attention.k_norm,
                eps=attention.eps,
                k_scale=cache.k_scale,
                v_scale=cache.v_scale,
            )

    def _decode(
        self, q: torch.Tensor, batch: ForwardBatch, cache: LayerCache, own: OwnTokens
    ) -> torch.Tensor:
        attention, rows = self.attention, batch.decode
        assert rows is not None
        mine = partial_attention_decode(
            q,
            cache.k,
            cache.v,
            rows.block_tables[cache.group],
            own.context_lens[: q.shape[0]],
            attention.scale,
            softcap=attention.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_context_len=own.max_context_len,
        )
        return merge_attention(self.share.gather(mine), attention.sinks, q.dtype)

    def _prefill(self, q: torch.Tensor, batch: ForwardBatch, cache: LayerCache) -> torch.Tensor:
        attention, rows = self.attention, batch.prefill
        assert rows is not None
        keys, values, tables = self._brought_together(
            cache, rows.block_tables[cache.group], batch.max_context_len
        )
        return paged_attention_prefill(
            q,
            keys,
            values,
            tables,
            rows.query_start,
            rows.context_lens,
            batch.max_query_len,
            attention.scale,
            sinks=attention.sinks,
            softcap=attention.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_context_len=batch.max_context_len,
        )

    def _brought_together(
        self, cache: LayerCache, tables: torch.Tensor, max_context_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A cache of whole blocks that holds the rows' contexts, and the rows' tables in it."""
        tokens = cache.k.shape[1] * self.share.parts
        # Entries behind a row's context may be anything; what they bring is never looked at.
        table = tables[:, : -(-max_context_len // tokens)].long().clamp(0, cache.k.shape[0] - 1)
        dtype = cache.k.dtype
        stored = (x.view(torch.uint8) if dtype == torch.float8_e4m3fn else x for x in (cache.k, cache.v))
        parts = self.share.gather(torch.stack([x[table] for x in stored]))
        whole = parts.permute(1, 2, 3, 0, 4, 5, 6).reshape(2, -1, tokens, *parts.shape[5:]).view(dtype)
        places = torch.arange(table.numel(), dtype=torch.int32, device=tables.device).view(table.shape)
        return whole[0], whole[1], places
