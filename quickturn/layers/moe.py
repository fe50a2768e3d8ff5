"""Mixtures of experts."""

from dataclasses import dataclass

import torch
from quickturn_kernels import ExpertWeights, Router, Routing, SharedExpert, moe_block, prepare_experts

from quickturn.layers.forward import ForwardBatch

__all__ = ["ExpertWeights", "Mixture", "Router", "Routing", "SharedExpert", "prepare_experts"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A router that chooses experts for each token, the experts, and the one that every token takes."""

    router: Router
    experts: ExpertWeights
    shared: SharedExpert | None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, H] -> [T, H]`; padding tokens choose no expert, so that they fetch no weights."""
        # Negative for padding. Behind the last mixer only sampled tokens are left, none of which is padding.
        places = batch.slot_mapping[0]
        known = places if places.shape[0] == x.shape[0] else None
        return moe_block(x, self.router, self.experts, shared=self.shared, positions=known)
