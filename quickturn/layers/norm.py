"""Root-mean-square norms (Zhang & Sennrich 2019) around the residual stream."""

from dataclasses import dataclass

import torch
from quickturn_kernels import add_rms_norm, rms_norm

from quickturn.layers.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class Norm:
    """`x / rms(x) * weight` over the last dim, weight `[H]`."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, H] -> [T, H]`; the residual stream is not touched."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class AddNorm:
    """Adds a branch to the residual stream, in place, and norms the stream."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, H], [T, H] -> [T, H]`."""
        return add_rms_norm(x, residual, self.weight, self.eps)
