"""Linear maps. Several checkpoint matrices that read the same input (q|k|v, gate|up) are one matrix here."""

from dataclasses import dataclass

import torch
from quickturn_kernels import LinearWeight, gelu_tanh_and_mul, linear, linear_silu_and_mul

from quickturn.layers.forward import ForwardBatch

__all__ = ["GatedLinear", "GeluGatedLinear", "Head", "Linear", "LinearWeight"]


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x W^T + b`, with x `[T, K]`, W `[N, K]` in the layout that the kernels chose, b `[N]`."""

    weight: LinearWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, K] -> [T, N]`."""
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class GatedLinear:
    """SwiGLU (Shazeer 2020) up to its second product: `silu(gate) * up`, with `gate|up = x W^T + b`."""

    weight: LinearWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, K] -> [T, I]`, with W `[2 I, K]`."""
        return linear_silu_and_mul(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class GeluGatedLinear:
    """GeGLU (Shazeer 2020) up to its second product: `gelu(gate) * up`, with `gate|up = x W^T + b` and the
    tanh form of gelu.
    """

    weight: LinearWeight
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, K] -> [T, I]`, with W `[2 I, K]`."""
        return gelu_tanh_and_mul(linear(x, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class Head:
    """The language-model head: hidden states `[S, H]` to float32 logits `[S, V]`, squashed to `softcap *
    tanh(logit / softcap)` unless that is 0.
    """

    weight: LinearWeight
    softcap: float = 0.0

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[S, H] -> [S, V]` in float32, so that close logits are not rounded into ties."""
        return self.squashed(linear(x, self.weight, None, torch.float32))

    def squashed(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits under the cap, in place."""
        return logits.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else logits
