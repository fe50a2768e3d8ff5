"""Mixtures of experts: routing, and the experts' gated feed-forward layers over the tokens that chose them.

A token's result depends on this token alone, and on the implementation: neither on the other tokens of the
call nor on timing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quickturn_kernels.ops.linear import linear, rows_class
from quickturn_kernels.ops.moe.weights import (
    Activation,
    ExpertWeights,
    GroupScore,
    Router,
    Routing,
    Scoring,
    SharedExpert,
    prepare_experts,
    prepare_shared_expert,
)
from quickturn_kernels.registry import Op, define

__all__ = [
    "Activation",
    "ExpertWeights",
    "GroupScore",
    "Router",
    "Routing",
    "Scoring",
    "SharedExpert",
    "moe",
    "moe_block",
    "prepare_experts",
    "prepare_shared_expert",
    "residual_moe_block",
    "residual_moe_rows",
    "route",
    "route_with",
    "router_logits",
]

_ROUTE: Op[Callable[[Tensor, Routing, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]] = define("route")
_MOE: Op[Callable[[Tensor, ExpertWeights, Tensor, Tensor, SharedExpert | None], Tensor]] = define(
    "moe", "layout", "rows"
)
_MOE_BLOCK: Op[Callable[[Tensor, Router, ExpertWeights, SharedExpert | None, Tensor | None], Tensor]] = (
    define("moe_block", "layout", "rows")
)
_RESIDUAL_BLOCK: Op[
    Callable[
        [Tensor, Tensor | None, Tensor, float, Router, ExpertWeights, SharedExpert | None, Tensor | None],
        None,
    ]
] = define("residual_moe_block", "layout", "rows")
_RESIDUAL_ROWS: Op[Callable[[Router, ExpertWeights, SharedExpert | None], int]] = define("residual_moe_rows")


def route(
    logits: Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    groups: int = 1,
    top_groups: int = 1,
    group_score: GroupScore = "top2",
    bias: Tensor | None = None,
    scale: float = 1.0,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` of E experts for each token.

    logits: [T, E], any float dtype; everything is computed in float32. scoring: what an expert's weight is
    made of, `softmax` over all logits, `sigmoid` of its own, `softmax_after` over the chosen logits alone
    (gpt_oss). normalize: divide the weights by their sum (+ 1e-20; `softmax_after` has sum 1 anyway).
    scale: multiplies them last. bias: [E], added to the scores for the choice alone (DeepSeek-V3's
    correction). groups: E is that many groups of neighbours, and only the `top_groups` best can be chosen
    from; a group's score is the sum of its two best scores with bias (`top2`, DeepSeek-V3) or its best
    (`max`, DeepSeek-V2). positions: int64 [T]; tokens with a negative one are padding and choose expert -1
    with weight 0.

    Returns weights float32 [T, top_k] and experts int32 [T, top_k], the best first; of equals the lower
    index, in groups, too. An expert is chosen at most once. Raises ValueError for counts that don't fit.
    """
    routing = Routing(top_k, scoring, normalize, groups, top_groups, group_score, scale)
    return route_with(logits, routing, bias, positions)


def route_with(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`route` with its options in one record."""
    count = logits.shape[1]
    groups = routing.groups
    if not (1 <= routing.top_groups <= groups and count % groups == 0):
        raise ValueError(f"{routing.top_groups} of {groups} groups of {count} experts")
    if not 1 <= routing.top_k <= routing.top_groups * (count // groups):
        raise ValueError(f"{routing.top_k} experts of {routing.top_groups} groups of {count // groups}")
    if groups > 1 and routing.group_score == "top2" and count // groups < 2:
        raise ValueError("the two best scores of groups of one expert")
    function = _ROUTE.table.get((logits.device, logits.dtype))
    if function is None:
        function = _ROUTE.bind(logits.device, logits.dtype)
    return function(logits, routing, bias, positions)


def moe(
    x: Tensor,
    experts: ExpertWeights,
    weights: Tensor,
    chosen: Tensor,
    *,
    shared: SharedExpert | None = None,
) -> Tensor:
    """`sum_j weights[t, j] * expert chosen[t, j] of x[t]`, and the shared expert's result.

    An expert is `down @ act(gate_up @ x + gate_up_bias) + down_bias`. x: [T, H]. weights: float32 [T, k].
    chosen: int32 [T, k], no expert twice in a row; numbers outside 0..E-1 contribute nothing (padding, or
    experts that live elsewhere). Gate, up and what the activation makes of them are rounded to x.dtype; the
    sum is float32 and rounded once. Returns a new [T, H] of x.dtype.
    """
    key = (x.device, x.dtype, experts.layout, rows_class(x.shape[0]))
    function = _MOE.table.get(key)
    if function is None:
        function = _MOE.bind(*key)
    return function(x, experts, weights, chosen, shared)


def moe_block(
    x: Tensor,
    router: Router,
    experts: ExpertWeights,
    *,
    shared: SharedExpert | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """A whole mixture-of-experts layer: the router's product, `route`, `moe`.

    x: [T, H]. positions: int64 [T] or None; tokens with a negative one are padding and choose no expert;
    their results are finite where x is, and otherwise unspecified. Logits are float32; a float32 router
    multiplies x in float32. Returns a new [T, H] of x.dtype.
    """
    key = (x.device, x.dtype, experts.layout, rows_class(x.shape[0]))
    function = _MOE_BLOCK.table.get(key)
    if function is None:
        function = _MOE_BLOCK.bind(*key)
    return function(x, router, experts, shared, positions)


def residual_moe_block(
    residual: Tensor,
    branch: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    router: Router,
    experts: ExpertWeights,
    *,
    shared: SharedExpert | None = None,
    positions: Tensor | None = None,
) -> None:
    """A mixture-of-experts layer on the residual stream: `residual += branch`, then `residual +=
    moe_block(rms_norm(residual, norm_weight, eps))`, both in place, each rounded to its dtype.

    residual: [T, H], rows may lie apart. branch: [T, H] or None; it doesn't change. norm_weight: [H], of
    residual's dtype or float32. The rest as for `moe_block`; padding tokens get something finite.
    """
    key = (residual.device, residual.dtype, experts.layout, rows_class(residual.shape[0]))
    function = _RESIDUAL_BLOCK.table.get(key)
    if function is None:
        function = _RESIDUAL_BLOCK.bind(*key)
    function(residual, branch, norm_weight, eps, router, experts, shared, positions)


def residual_moe_rows(router: Router, experts: ExpertWeights, shared: SharedExpert | None) -> int:
    """Up to how many rows `residual_moe_block` is faster than what it is made of; 0 where it never is."""
    key = (experts.down.device, router.weight.dtype)
    function = _RESIDUAL_ROWS.table.get(key)
    if function is None:
        function = _RESIDUAL_ROWS.bind(*key)
    return function(router, experts, shared)


def router_logits(x: Tensor, router: Router) -> Tensor:
    """float32 [T, E]."""
    if router.weight.dtype == torch.float32:
        x = x.float()
    return linear(x, router.weight, router.bias, torch.float32)
