"""Mixtures of experts on Hopper, bfloat16: many tokens by warpgroup products, very few by launches of their
own, up to 64 by Triton's products between launches of ours.
"""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear import FEW_ROWS, PLAIN
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe import hopper_few, hopper_grouped, hopper_mid, hopper_route
from quickturn_kernels.ops.moe.hopper_few import Stream, takes_rows
from quickturn_kernels.ops.moe.hopper_mid import Choice
from quickturn_kernels.ops.moe.reference import moe_block as composed
from quickturn_kernels.ops.moe.reference import normed_stream
from quickturn_kernels.ops.moe.reference import residual_moe_block as composed_on_stream
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
        traits={"layout": {PLAIN, FP8_BLOCK}},
        priority=Priority.SPECIALIZED,
    )
    def moe(
        x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
    ) -> Tensor:
        """See `quickturn_kernels.moe`. Up to 64 tokens by `hopper_mid`; above, Triton's products below 48
        tokens an expert on average; tiles by T * k / E.
        """
        if hopper_mid.takes_rows(x) and hopper_mid.takes(experts, chosen.shape[1], shared):
            given = weights.contiguous(), chosen.contiguous()
            return hopper_mid.launch(x, experts, Choice(Routing(chosen.shape[1]), given=given), shared)
        if chosen.numel() < GROUPED_ROWS * experts.count or not hopper_grouped.takes(x, experts):
            return portable(x, experts, weights, chosen, shared)
        return hopper_grouped.moe(x, experts, weights.contiguous(), chosen.contiguous(), shared)

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
        """See `quickturn_kernels.route`. Slower than the portable one: taken when named."""
        if logits.stride(1) != 1 or not hopper_route.takes(logits.shape[1], routing, bias):
            return portable_route(logits, routing, bias, positions)
        return hopper_route.launch_route(logits, routing, bias, positions)

    @register(
        "moe_block",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN, FP8_BLOCK}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def moe_block(
        x: Tensor,
        router: Router,
        experts: ExpertWeights,
        shared: SharedExpert | None,
        positions: Tensor | None,
    ) -> Tensor:
        """See `quickturn_kernels.moe_block`. Which launches depends on the number of tokens."""
        if hopper_few.takes(experts, router, shared) and takes_rows(x, experts, router, shared):
            return hopper_few.launch(x, router, experts, shared, positions)
        if hopper_mid.takes_rows(x) and hopper_mid.takes(experts, router.routing.top_k, shared):
            choice = hopper_mid.choose(x, router, experts.count, positions)
            return hopper_mid.launch(x, experts, choice, shared, positions)
        return composed(x, router, experts, shared, positions)

    @register(
        "residual_moe_block",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"layout": {PLAIN, FP8_BLOCK}, "rows": {"few"}},
        priority=Priority.SPECIALIZED,
    )
    def residual_moe_block(
        residual: Tensor,
        branch: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        router: Router,
        experts: ExpertWeights,
        shared: SharedExpert | None,
        positions: Tensor | None,
    ) -> None:
        """See `quickturn_kernels.residual_moe_block`. Which launches depends on the number of tokens."""
        if (
            hopper_few.takes(experts, router, shared)
            and hopper_few.takes_norm(norm_weight)
            and takes_rows(residual, experts, router, shared)
            and (branch is None or takes_rows(branch, experts, router, shared))
        ):
            stream = Stream(residual, norm_weight, eps)
            hopper_few.launch(branch, router, experts, shared, positions, stream)
        elif hopper_mid.takes_rows(residual) and hopper_mid.takes(experts, router.routing.top_k, shared):
            x = normed_stream(residual, branch, norm_weight, eps)
            choice = hopper_mid.choose(x, router, experts.count, positions)
            hopper_mid.launch(x, experts, choice, shared, positions, residual)
        else:
            composed_on_stream(residual, branch, norm_weight, eps, router, experts, shared, positions)

    @register("residual_moe_rows", name="hopper", platform=HOPPER, priority=Priority.SPECIALIZED)
    def residual_moe_rows(router: Router, experts: ExpertWeights, shared: SharedExpert | None) -> int:
        """Where the sum goes to the stream at no cost."""
        if hopper_mid.takes(experts, router.routing.top_k, shared):
            return FEW_ROWS
        return hopper_few.MAX_TOKENS if hopper_few.takes(experts, router, shared) else 0
