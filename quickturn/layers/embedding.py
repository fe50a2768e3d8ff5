"""Token ids to vectors."""

from dataclasses import dataclass

import torch
from quickturn_kernels import LinearWeight, embedding

from quickturn.layers.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of `weight` `[V, H]`, a table or, where the head is tied, the matrix laid out for the head, times
    `scale`.
    """

    weight: torch.Tensor | LinearWeight
    scale: float = 1.0

    def __call__(self, ids: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`int64 [T] -> [T, H]`, a tensor of its own: it becomes the residual stream."""
        rows = embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
