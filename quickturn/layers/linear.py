"""Linear maps. Several checkpoint matrices that read the same input (q|k|v, gate|up) are one matrix here."""

from dataclasses import dataclass

import torch
from quickturn_kernels import LinearWeight, linear, linear_silu_and_mul

from quickturn.layers.forward import ForwardBatch

__all__ = ["GatedLinear", "Head", "Linear", "LinearWeight"]


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
class Head:
    """The language-model head: hidden states `[S, H]` to float32 logits `[S, V]`."""

    weight: LinearWeight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[S, H] -> [S, V]` in float32, so that close logits are not rounded into ties."""
        return linear(x, self.weight, None, torch.float32)
