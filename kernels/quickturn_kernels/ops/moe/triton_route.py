"""Routing in Triton: one program a token, its scores held in registers as [groups, experts of a group]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.moe.weights import Routing
from quickturn_kernels.triton_common import next_power_of_two

LEAST = tl.constexpr(-3.0e38)
"""What a score counts for at least, NaN and minus infinity included: only what can't be chosen lies below."""


@triton.jit
def route_kernel(
    logits,
    bias,
    positions,
    weights,
    chosen,
    logits_stride,
    members,
    scale,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PAD: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TWO_BEST: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_MEMBERS: tl.constexpr,
):
    """weights and chosen [T, TOP] of one token; see `quickturn_kernels.route`."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_GROUPS)
    member = tl.arange(0, BLOCK_MEMBERS)
    expert = group[:, None] * members + member[None, :]
    inside = (group[:, None] < GROUPS) & (member[None, :] < members)
    value = tl.load(logits + token * logits_stride + expert, mask=inside, other=0.0).to(tl.float32)
    if SCORING == "sigmoid":
        score = tl.sigmoid(value)
    elif SCORING == "softmax":
        top = tl.max(tl.max(tl.where(inside, value, float("-inf")), axis=1), axis=0)
        power = tl.where(inside, tl.exp(value - top), 0.0)
        score = power / tl.sum(tl.sum(power, axis=1), axis=0)
    else:
        score = value
    choice = score
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(choice > LEAST, choice, LEAST)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        best, place = tl.max(choice, axis=1, return_indices=True, return_indices_tie_break_left=True)
        if TWO_BEST:
            rest = tl.where(member[None, :] == place[:, None], float("-inf"), choice)
            best += tl.max(rest, axis=1)
        best = tl.where(group < GROUPS, tl.maximum(best, LEAST), float("-inf"))
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            _, first = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
            kept = kept | (group == first)
            best = tl.where(group == first, float("-inf"), best)
        choice = tl.where(kept[:, None], choice, float("-inf"))
    flat = tl.reshape(choice, [BLOCK_GROUPS * BLOCK_MEMBERS])
    flat_score = tl.reshape(score, [BLOCK_GROUPS * BLOCK_MEMBERS])
    index = tl.arange(0, BLOCK_GROUPS * BLOCK_MEMBERS)
    slot = tl.arange(0, TOP_PAD)
    found = tl.zeros([TOP_PAD], dtype=tl.int32)
    weight = tl.full([TOP_PAD], float("-inf"), dtype=tl.float32)
    for j in tl.static_range(TOP):
        _, first = tl.max(flat, axis=0, return_indices=True, return_indices_tie_break_left=True)
        found = tl.where(slot == j, first // BLOCK_MEMBERS * members + first % BLOCK_MEMBERS, found)
        weight = tl.where(slot == j, tl.sum(tl.where(index == first, flat_score, 0.0), axis=0), weight)
        flat = tl.where(index == first, float("-inf"), flat)
    used = slot < TOP
    if SCORING == "softmax_after":
        weight = tl.exp(weight - tl.max(weight, axis=0))
        weight = weight / tl.sum(weight, axis=0)
    elif NORMALIZE:
        weight = weight / (tl.sum(tl.where(used, weight, 0.0), axis=0) + 1e-20)
    weight *= scale
    if PADDED:
        real = tl.load(positions + token) >= 0
        weight = tl.where(real, weight, 0.0)
        found = tl.where(real, found, -1)
    tl.store(weights + token * TOP + slot, weight, mask=used)
    tl.store(chosen + token * TOP + slot, found, mask=used)


def launch_route(
    logits: Tensor, routing: Routing, bias: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `quickturn_kernels.route`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    tokens, count = logits.shape
    top, members = routing.top_k, count // routing.groups
    weights = torch.empty((tokens, top), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top), dtype=torch.int32, device=logits.device)
    if tokens > 0:
        route_kernel[(tokens,)](
            logits,
            bias,
            positions,
            weights,
            chosen,
            logits.stride(0),
            members,
            routing.scale,
            SCORING=routing.scoring,
            NORMALIZE=routing.normalize,
            HAS_BIAS=bias is not None,
            PADDED=positions is not None,
            TOP=top,
            TOP_PAD=next_power_of_two(top),
            GROUPS=routing.groups,
            TOP_GROUPS=routing.top_groups,
            TWO_BEST=routing.group_score == "top2",
            BLOCK_GROUPS=next_power_of_two(routing.groups),
            BLOCK_MEMBERS=next_power_of_two(members),
            num_warps=1 if count <= 256 else 2,
        )
    return weights, chosen
