"""Mixtures of experts in plain PyTorch: one expert after the other, over the tokens that chose it."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import linear
from quickturn_kernels.ops.moe import moe, route_with, router_logits
from quickturn_kernels.ops.moe import moe_block as as_one_layer
from quickturn_kernels.ops.moe.weights import (
    FP8_SIDE,
    GPT_OSS_ALPHA,
    GPT_OSS_LIMIT,
    Activation,
    ExpertWeights,
    Router,
    Routing,
    SharedExpert,
)
from quickturn_kernels.ops.norm import add_rms_norm, rms_norm
from quickturn_kernels.registry import Priority, register


@register("route", name="reference", priority=Priority.REFERENCE)
def route(
    logits: Tensor, routing: Routing, bias: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `quickturn_kernels.route`."""
    logits = logits.float()
    if routing.scoring == "sigmoid":
        scores = torch.sigmoid(logits)
    elif routing.scoring == "softmax":
        scores = torch.softmax(logits, -1)
    else:
        scores = logits
    choice = scores if bias is None else scores + bias.float()
    choice = _of_best_groups(choice, routing)
    chosen = _best(choice, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.scoring == "softmax_after":
        weights = torch.softmax(weights, -1)
    elif routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * routing.scale
    if positions is not None:
        padding = (positions < 0)[:, None]
        weights, chosen = weights.masked_fill(padding, 0.0), chosen.masked_fill(padding, -1)
    return weights, chosen.to(torch.int32)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indexes of the greatest along the last dim, of equals the lowest first (topk promises none)."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def _of_best_groups(choice: Tensor, routing: Routing) -> Tensor:
    if routing.groups == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], routing.groups, -1)
    best = grouped.topk(2 if routing.group_score == "top2" else 1, -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, routing.top_groups), True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


@register("moe", name="reference", priority=Priority.REFERENCE)
def moe_reference(
    x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
) -> Tensor:
    """See `quickturn_kernels.moe`."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in torch.unique(chosen).tolist():
        if not 0 <= expert < experts.count:
            continue
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        result = _expert(x[tokens], experts, expert).float()
        total.index_add_(0, tokens, result * weights[tokens, slots, None])
    if shared is not None:
        total += shared_result(x, shared)
    return total.to(x.dtype)


def _expert(x: Tensor, experts: ExpertWeights, expert: int) -> Tensor:
    gate_up = _matrix(experts.gate_up, experts.gate_up_scale, expert, x.dtype)
    bias = None if experts.gate_up_bias is None else experts.gate_up_bias[expert].to(x.dtype)
    inner = activate(functional.linear(x, gate_up, bias), experts.activation)
    bias = None if experts.down_bias is None else experts.down_bias[expert].to(x.dtype)
    return functional.linear(inner, _matrix(experts.down, experts.down_scale, expert, x.dtype), bias)


def _matrix(stored: Tensor, scale: Tensor | None, expert: int, dtype: torch.dtype) -> Tensor:
    matrix = stored[expert]
    if scale is None:
        return matrix
    rows, columns = matrix.shape
    factors = scale[expert].repeat_interleave(FP8_SIDE, 0)[:rows]
    return (matrix.float() * factors.repeat_interleave(FP8_SIDE, 1)[:, :columns]).to(dtype)


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """[..., 2I] to [..., I] in its dtype."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "silu":
        return functional.silu(gate) * up
    gate = gate.clamp(max=GPT_OSS_LIMIT)
    up = up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * GPT_OSS_ALPHA))


def shared_result(x: Tensor, shared: SharedExpert) -> Tensor:
    """float32 [T, H]."""
    result = linear(linear_silu_and_mul(x, shared.gate_up), shared.down, None, torch.float32)
    return result if shared.gate is None else result * shared_factor(x, shared.gate)


def shared_factor(x: Tensor, gate: Tensor) -> Tensor:
    """float32 [T, 1]."""
    return torch.sigmoid(functional.linear(x, gate).float())


@register("moe_block", name="reference", priority=Priority.PORTABLE)
def moe_block(
    x: Tensor,
    router: Router,
    experts: ExpertWeights,
    shared: SharedExpert | None,
    positions: Tensor | None,
) -> Tensor:
    """The layer as the ops that it's made of, each in the tier that suits; so above the reference tier."""
    weights, chosen = route_with(router_logits(x, router), router.routing, router.correction, positions)
    return moe(x, experts, weights, chosen, shared=shared)


@register("residual_moe_block", name="reference", priority=Priority.PORTABLE)
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
    """As `moe_block`, as the ops that it's made of."""
    x = normed_stream(residual, branch, norm_weight, eps)
    residual.add_(as_one_layer(x, router, experts, shared=shared, positions=positions))


def normed_stream(residual: Tensor, branch: Tensor | None, norm_weight: Tensor, eps: float) -> Tensor:
    """`residual += branch` in place, if there is one, and the norm of that, a new [T, H]."""
    if branch is None:
        return rms_norm(residual, norm_weight, eps)
    return add_rms_norm(branch, residual, norm_weight, eps)


@register("residual_moe_rows", name="reference", priority=Priority.REFERENCE)
def residual_moe_rows(router: Router, experts: ExpertWeights, shared: SharedExpert | None) -> int:
    """Never: these are the ops that it's made of."""
    return 0
