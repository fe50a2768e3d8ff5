"""Token ids to vectors."""

from dataclasses import dataclass

import torch
from quickturn_kernels import LinearWeight, embedding

from quickturn.layers.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of `weight` `[V, H]`, a table or, where the head is tied, the matrix laid out for the head."""

    weight: torch.Tensor | LinearWeight

    def __call__(self, ids: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`int64 [T] -> [T, H]`, a tensor of its own: it becomes the residual stream."""
        return embedding(ids, self.weight)
