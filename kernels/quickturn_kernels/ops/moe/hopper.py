"""Mixtures of experts over few bfloat16 tokens on Hopper: the weights stream at the speed of memory."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear import PLAIN
from quickturn_kernels.ops.moe.hopper_launch import launch, takes, takes_router
from quickturn_kernels.ops.moe.reference import moe_block as composed
from quickturn_kernels.ops.moe.triton import moe as portable
from quickturn_kernels.ops.moe.weights import ExpertWeights, Router, SharedExpert
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "moe",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.REFERENCE,
    )
    def moe(
        x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
    ) -> Tensor:
        """See `quickturn_kernels.moe`."""
        if not takes(x, experts, chosen.shape[1], shared):
            return portable(x, experts, weights, chosen, shared)
        return launch(x, experts, shared, choice=(weights.contiguous(), chosen.contiguous()))

    @register(
        "moe_block",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"few"}},
        priority=Priority.REFERENCE,
    )
    def moe_block(
        x: Tensor,
        router: Router,
        experts: ExpertWeights,
        shared: SharedExpert | None,
        positions: Tensor | None,
    ) -> Tensor:
        """See `quickturn_kernels.moe_block`."""
        if not (takes(x, experts, router.routing.top_k, shared) and takes_router(x, router)):
            return composed(x, router, experts, shared, positions)
        return launch(x, experts, shared, router=router, positions=positions)
