"""Mixtures of experts."""

from dataclasses import dataclass

import torch
from quickturn_kernels import (
    ExpertWeights,
    Router,
    Routing,
    SharedExpert,
    moe,
    moe_block,
    prepare_experts,
)
from quickturn_kernels.ops.moe import route_with, router_logits

from quickturn.layers.forward import ForwardBatch

__all__ = ["ExpertWeights", "Mixture", "Router", "Routing", "SharedExpert", "prepare_experts"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A router that chooses experts for each token, the experts, and the one that every token takes.

    `first`: the router's number of the first expert here, where others lie elsewhere, else None. `gathered`:
    the tokens aren't the batch's, one for one, so that nobody knows which are padding.
    """

    router: Router
    experts: ExpertWeights
    shared: SharedExpert | None
    first: int | None = None
    gathered: bool = False

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, H] -> [T, H]`; padding tokens choose no expert, so that they fetch no weights. What experts
        elsewhere make of a token is missing.
        """
        # Negative for padding. Behind the last mixer only sampled tokens are left, none of which is padding.
        places = batch.slot_mapping[0]
        known = places if places.shape[0] == x.shape[0] and not self.gathered else None
        if self.first is None:
            return moe_block(x, self.router, self.experts, shared=self.shared, positions=known)
        logits = router_logits(x, self.router)
        weights, chosen = route_with(logits, self.router.routing, self.router.correction, known)
        return moe(x, self.experts, weights, chosen - self.first, shared=self.shared)
