"""Mixtures of experts on Hopper, bfloat16: many tokens by warpgroup products; few in one launch, and routing
in CUDA C++, where they are named.
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

GROUPED_ROWS = 48
"""From so many tokens an expert on average the grouped products are ahead of Triton's (H200, 256 experts)."""

if cuda_build.available((9, 0)):

    @register(
        "moe",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN}, "rows": {"many"}},
        priority=Priority.SPECIALIZED,
    )
    def moe(
        x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
    ) -> Tensor:
        """See `quickturn_kernels.moe`. Triton below 48 tokens an expert on average; tiles by T * k / E."""
        if chosen.numel() < GROUPED_ROWS * experts.count or not hopper_grouped.takes(x, experts):
            return portable(x, experts, weights, chosen, shared)
        return hopper_grouped.moe(x, experts, weights.contiguous(), chosen.contiguous(), shared)

    # The three below are slower than the portable ones so far (docs/performance/moe.md): taken when named.

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
        name="hopper_few",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN, FP8_BLOCK}, "rows": {"few"}},
        priority=Priority.REFERENCE,
    )
    def moe_few(
        x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
    ) -> Tensor:
        """See `quickturn_kernels.moe`."""
        if not takes(x, experts, chosen.shape[1], shared):
            return portable(x, experts, weights, chosen, shared)
        return launch(x, experts, shared, choice=(weights.contiguous(), chosen.contiguous()))

    @register(
        "moe_block",
        name="hopper_few",
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
