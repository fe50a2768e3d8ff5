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
from quickturn_kernels.ops.moe.reference import shared_result

from quickturn.layers.forward import ForwardBatch

__all__ = ["ExpertWeights", "Mixture", "Router", "Routing", "SharedExpert", "prepare_experts"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A router that chooses experts for each token, the experts, and the one that every token takes.

    `first`: the router's number of the first expert here, where others lie elsewhere, else None. `gathered`:
    the tokens aren't the batch's, one for one, so that nobody knows which are padding. `whole`: the one that
    every token takes, as `beside` has it: `shared` may be a summand of more ranks.
    """

    router: Router
    experts: ExpertWeights
    shared: SharedExpert | None
    first: int | None = None
    gathered: bool = False
    whole: SharedExpert | None = None

    @property
    def here(self) -> int:
        """Number of experts that are here."""
        return self.experts.count

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, H]` to float32 weights and int32 numbers of experts among all, `[T, k]`."""
        return route_with(router_logits(x, self.router), self.router.routing, self.router.correction)

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`[R, H] -> [R, H]`: what the experts here make of rows, `chosen` being their numbers here; others
        are none.
        """
        return moe(x, self.experts, weights, chosen)

    def beside(self, x: torch.Tensor) -> torch.Tensor | None:
        """What the expert that every token takes makes of them, float32 `[T, H]`."""
        return None if self.whole is None else shared_result(x, self.whole)

    def positions(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor | None:
        """int64 `[T]`, negative for padding; None if nobody knows."""
        # Behind the last mixer only sampled tokens are left, none of which is padding.
        places = batch.slot_mapping[0]
        return places if places.shape[0] == x.shape[0] and not self.gathered else None

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """`[T, H] -> [T, H]`; padding tokens choose no expert, so that they fetch no weights. What experts
        elsewhere make of a token is missing.
        """
        known = self.positions(x, batch)
        if self.first is None:
            return moe_block(x, self.router, self.experts, shared=self.shared, positions=known)
        logits = router_logits(x, self.router)
        weights, chosen = route_with(logits, self.router.routing, self.router.correction, known)
        return moe(x, self.experts, weights, chosen - self.first, shared=self.shared)
