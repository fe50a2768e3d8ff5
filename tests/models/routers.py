"""Where the router of a mixture can't decide: there a rounding error does, and is no longer small."""

import torch
from transformers import PreTrainedModel

LEVEL = 5e-4
"""Logits of a router nearer than this are level: float32's errors reach 3e-4 behind a recurrence."""


@torch.inference_mode()
def decided_logits(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [B, T, V] of token ids [B, T], and where they say something [B, T]: not from the first token
    on for which the last expert that a router takes and the next one are level.

    Of tiny random mixtures that is one token in a thousand; in one of a hundred of these, another order of
    sums takes the other expert, and logits differ by one.
    """
    nearest = torch.full(ids.shape, torch.inf)

    def watch(router: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        x = given[0].reshape(*ids.shape, -1)
        best = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None)).sort(-1).values
        apart = best[..., -router.top_k] - best[..., -router.top_k - 1]
        nearest.copy_(torch.minimum(nearest, apart))

    routers = [module for module in model.modules() if hasattr(module, "top_k") and hasattr(module, "weight")]
    hooks = [router.register_forward_pre_hook(watch) for router in routers]
    try:
        logits = model(ids).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits, nearest.cummin(-1).values >= LEVEL
