"""Causal attention over the paged cache."""

from dataclasses import dataclass

import torch
from quickturn_kernels import (
    paged_attention_decode,
    paged_attention_prefill,
    rotary_attention_decode,
    rotary_cache_write,
    sigmoid_gate,
)

from quickturn.layers.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotary embedding, cache write and grouped-query attention of decoder layer `layer`.

    `queries_per_kv` query heads share a key-value head; how many heads there are is read off the width of the
    input, so that a share of the heads needs no other layer. `cos_sin`: float32 `[positions, rotary_dim]`.
    `window`: tokens seen back, 0 for all. `q_norm`, `k_norm` `[D]`: weights of a norm of each head ahead of
    the rotation (Qwen3), or None. `gated`: the input ends with a gate for each query head, whose sigmoid
    multiplies the output (Qwen3-Next). `sinks` `[Hq]`: one more logit a head in the softmax's denominator
    (gpt-oss). `softcap`: scores become `softcap * tanh(score / softcap)`, 0 for not.
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
    gated: bool = False
    sinks: torch.Tensor | None = None
    softcap: float = 0.0

    def __call__(self, qkv: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Fused `q|k|v` or `q|k|v|gate` `[T, (Hq + 2 Hkv [+ Hq]) D] -> [T, Hq D]`; writes this step's keys
        and values.
        """
        q, k, v = self.split(qkv)
        if batch.prefill is None and self.sinks is None and not self.softcap:
            gate = qkv[:, -q.shape[1] * q.shape[2] :] if self.gated else None
            return self._step(q, k, v, gate, batch).view(qkv.shape[0], -1)
        return self.gate(self._attend(q, k, v, batch).view(qkv.shape[0], -1), qkv)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[T, Hq, D]`, k and v `[T, Hkv, D]`, all views."""
        tokens, width = qkv.shape
        per_kv = self.queries_per_kv * (2 if self.gated else 1) + 2
        kv_heads = width // (self.head_dim * per_kv)
        query_heads = kv_heads * self.queries_per_kv
        heads = qkv.view(tokens, -1, self.head_dim)
        q, k, v = heads[:, : query_heads + 2 * kv_heads].split_with_sizes(
            (query_heads, kv_heads, kv_heads), 1
        )
        return q, k, v

    def gate(self, out: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """`out` `[T, Hq D]`, gated if this attention is."""
        return sigmoid_gate(out, qkv[:, -out.shape[1] :]) if self.gated else out

    def _step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """One new token a row. What is read but q, k, v and the gate was gathered or written several kernels
        ago, ahead of the norm and the projection.
        """
        cache = batch.keys_and_values(self.layer)
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
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_context_len=batch.max_context_len,
            settled=True,
            gate=gate,
        )

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        cache = batch.keys_and_values(self.layer)
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
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        if batch.decode is None:
            return self._prefill(q, batch)
        n = batch.num_decode
        if batch.prefill is None:
            return self._decode(q, batch)
        return torch.cat((self._decode(q[:n], batch), self._prefill(q[n:], batch)))

    def _decode(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        cache, rows = batch.keys_and_values(self.layer), batch.decode
        assert rows is not None
        return paged_attention_decode(
            q,
            cache.k,
            cache.v,
            rows.block_tables[cache.group],
            rows.context_lens,
            self.scale,
            window=self.window,
            sinks=self.sinks,
            softcap=self.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_context_len=batch.max_context_len,
        )

    def _prefill(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        cache, rows = batch.keys_and_values(self.layer), batch.prefill
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
            sinks=self.sinks,
            softcap=self.softcap,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
            max_context_len=batch.max_context_len,
        )
