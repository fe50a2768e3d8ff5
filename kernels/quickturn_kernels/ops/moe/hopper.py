"""Mixtures of experts on Hopper, bfloat16: few tokens in one launch at the speed of memory, many by warpgroup
products.
"""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear import PLAIN
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe import hopper_grouped, hopper_route
from quickturn_kernels.ops.moe.hopper_launch import launch, takes, takes_router
from quickturn_kernels.ops.moe.reference import moe_block as composed
from quickturn_kernels.ops.moe.triton import moe as portable
from quickturn_kernels.ops.moe.triton import route as portable_route
from quickturn_kernels.ops.moe.weights import ExpertWeights, Router, Routing, SharedExpert
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "route",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.float32,),
        priority=Priority.REFERENCE,
    )
    def route(
        logits: Tensor, routing: Routing, bias: Tensor | None, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `quickturn_kernels.route`."""
        if logits.stride(1) != 1 or not hopper_route.takes(logits.shape[1], routing, bias):
            return portable_route(logits, routing, bias, positions)
        return hopper_route.launch_route(logits, routing, bias, positions)

    @register(
        "moe",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN, FP8_BLOCK}},
        priority=Priority.REFERENCE,
    )
    def moe(
        x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
    ) -> Tensor:
        """See `quickturn_kernels.moe`. Up to 64 tokens in one launch; above, tiles by T * k / E."""
        weights, chosen = weights.contiguous(), chosen.contiguous()
        if takes(x, experts, chosen.shape[1], shared):
            return launch(x, experts, shared, choice=(weights, chosen))
        if x.shape[0] > 0 and hopper_grouped.takes(x, experts):
            return hopper_grouped.moe(x, experts, weights, chosen, shared)
        return portable(x, experts, weights, chosen, shared)

    @register(
        "moe_block",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN, FP8_BLOCK}, "rows": {"few"}},
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
