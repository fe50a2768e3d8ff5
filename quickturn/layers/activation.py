"""Gated activations of feed-forward layers."""

from dataclasses import dataclass

import torch
from quickturn_kernels import silu_and_mul

from quickturn.layers.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class SiluAndMul:
    """SwiGLU (Shazeer 2020): `silu(gate) * up` of a fused `gate|up`."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, 2 I] -> [T, I]`."""
        return silu_and_mul(x)
