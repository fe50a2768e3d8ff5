"""Causal attention over the paged cache."""

from dataclasses import dataclass

import torch
from quickturn_kernels import (
    paged_attention_decode,
    paged_attention_prefill,
    rotary_attention_decode,
    rotary_cache_write,
)

from quickturn.layers.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotary embedding, cache write and grouped-query attention of decoder layer `layer`.

    `queries_per_kv` query heads share a key-value head; how many heads there are is read off the width of the
    input, so that a share of the heads needs no other layer. `cos_sin`: float32 `[positions, rotary_dim]`.
    `window`: tokens seen back, 0 for all. `q_norm`, `k_norm` `[D]`: weights of a norm of each head ahead of
    the rotation (Qwen3), or None.
    """

    layer: int
    head_dim: int
    queries_per_kv: int
    scale: float
    cos_sin: torch.Tensor
    window: int = 0
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6

    def __call__(self, qkv: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Fused `q|k|v` `[T, (Hq + 2 Hkv) D] -> [T, Hq D]`; writes this step's keys and values."""
        tokens, width = qkv.shape
        kv_heads = width // (self.head_dim * (self.queries_per_kv + 2))
        heads = qkv.view(tokens, -1, self.head_dim)
        q, k, v = heads.split_with_sizes((kv_heads * self.queries_per_kv, kv_heads, kv_heads), 1)
        cache = batch.caches[self.layer]
        if batch.prefill is None:
            # What it reads but q, k and v was gathered or written several kernels ago, ahead of the norm and
            # the projection.
            return rotary_attention_decode(
                q,
                k,
                v,
                batch.positions,
                self.cos_sin,
                cache.k,
                cache.v,
                batch.slot_mapping[cache.group],
                batch.block_tables[cache.group],
                batch.context_lens,
                self.scale,
                q_weight=self.q_norm,
                k_weight=self.k_norm,
                eps=self.eps,
                window=self.window,
                max_context_len=batch.max_context_len,
                settled=True,
            ).view(tokens, -1)
        rotary_cache_write(
            q,
            k,
            v,
            batch.positions,
            self.cos_sin,
            cache.k,
            cache.v,
            batch.slot_mapping[cache.group],
            q_weight=self.q_norm,
            k_weight=self.k_norm,
            eps=self.eps,
        )
        if batch.decode is None:
            out = self._prefill(q, batch)
        else:
            n = batch.num_decode
            out = torch.cat((self._decode(q[:n], batch), self._prefill(q[n:], batch)))
        return out.view(tokens, -1)

    def _decode(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        cache, rows = batch.caches[self.layer], batch.decode
        assert rows is not None
        return paged_attention_decode(
            q,
            cache.k,
            cache.v,
            rows.block_tables[cache.group],
            rows.context_lens,
            self.scale,
            window=self.window,
            max_context_len=batch.max_context_len,
        )

    def _prefill(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        cache, rows = batch.caches[self.layer], batch.prefill
        assert rows is not None
        return paged_attention_prefill(
            q,
            cache.k,
            cache.v,
            rows.block_tables[cache.group],
            rows.query_start,
            rows.context_lens,
            batch.max_query_len,
            self.scale,
            window=self.window,
            max_context_len=batch.max_context_len,
        )
