"""Linear attention: what lies between a layer's projections, and reads and writes its state."""

from dataclasses import dataclass

import torch
from quickturn_kernels import causal_conv1d, gated_delta_prefill, gated_delta_step, gated_rms_norm

from quickturn.layers.forward import ForwardBatch, Rows, StateRows


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """Causal convolution, gated delta rule and gated norm (Yang et al. 2024, 2412.06464) of decoder layer
    `layer`.

    `values_per_key` value heads share a query-key head; how many heads there are is read off `a_log` `[Hv]`,
    so that a share of the heads needs no other layer. conv_weight: `[C, W]`. a_log, dt_bias: float32 `[Hv]`.
    norm_weight: `[Dv]`.
    """

    layer: int
    values_per_key: int
    key_dim: int
    value_dim: int
    conv_weight: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`q|k|v|z|b|a` `[T, 2 Hk Dk + 2 Hv Dv + 2 Hv] -> [T, Hv Dv]`; reads and writes the rows' states.

        Each row reads one block of the arena and writes one, by index: no state is copied.
        """
        if batch.prefill is None:
            return self._decode(x, batch, batch.states).flatten(1)
        if batch.decode is None:
            return self._prefill(x, batch, batch.prefill).flatten(1)
        n = batch.num_decode
        decoded = self._decode(x[:n], batch, batch.decode.states)
        return torch.cat((decoded, self._prefill(x[n:], batch, batch.prefill))).flatten(1)

    def _decode(self, x: torch.Tensor, batch: ForwardBatch, states: tuple[StateRows, ...]) -> torch.Tensor:
        cache = batch.state(self.layer)
        rows = states[cache.group]
        qkv, z, b, a = self._split(x)
        return gated_delta_step(
            qkv,
            self.conv_weight,
            cache.conv,
            a,
            b,
            self.a_log,
            self.dt_bias,
            cache.recurrent,
            rows.reads,
            rows.writes,
            rows.zero,
            key_heads=self._heads[0],
            scale=self.key_dim**-0.5,
            gate=z,
            norm_weight=self.norm_weight,
            eps=self.eps,
            settled=True,
        )

    def _prefill(self, x: torch.Tensor, batch: ForwardBatch, part: Rows) -> torch.Tensor:
        cache = batch.state(self.layer)
        rows = part.states[cache.group]
        key_heads, heads = self._heads
        tokens = x.shape[0]
        qkv, z, b, a = self._split(x)
        mixed = causal_conv1d(
            qkv,
            self.conv_weight,
            cache.conv,
            rows.reads,
            rows.writes,
            rows.zero,
            part.query_start,
            max_query_len=batch.max_query_len,
        )
        keys = key_heads * self.key_dim
        q, k, v = mixed.split_with_sizes((keys, keys, heads * self.value_dim), 1)
        out = gated_delta_prefill(
            q.view(tokens, key_heads, self.key_dim),
            k.view(tokens, key_heads, self.key_dim),
            v.view(tokens, heads, self.value_dim),
            a,
            b,
            self.a_log,
            self.dt_bias,
            cache.recurrent,
            rows.reads,
            rows.writes,
            rows.zero,
            part.query_start,
            max_query_len=batch.max_query_len,
            scale=self.key_dim**-0.5,
            context_lens=part.context_lens,
        )
        return gated_rms_norm(out, z, self.norm_weight, self.eps)

    @property
    def _heads(self) -> tuple[int, int]:
        """Key heads and value heads here."""
        heads = self.a_log.shape[0]
        return heads // self.values_per_key, heads

    def _split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q|k|v `[T, C]`, z `[T, Hv, Dv]`, b and a `[T, Hv]`, all views."""
        key_heads, heads = self._heads
        values = heads * self.value_dim
        sizes = (2 * key_heads * self.key_dim + values, values, heads, heads)
        qkv, z, b, a = x.split_with_sizes(sizes, 1)
        return qkv, z.view(x.shape[0], heads, self.value_dim), b, a
