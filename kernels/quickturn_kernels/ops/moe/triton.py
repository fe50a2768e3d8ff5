"""Mixtures of experts in Triton: route, sort into tiles, two grouped products, weighted sum."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import PLAIN, linear
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe.triton_experts import combine_kernel, down_kernel, gate_up_kernel
from quickturn_kernels.ops.moe.triton_route import launch_route
from quickturn_kernels.ops.moe.triton_tiles import Tiles, make_tiles
from quickturn_kernels.ops.moe.weights import ExpertWeights, Routing, SharedExpert
from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, INTERPRETED, next_power_of_two


@dataclass(frozen=True)
class Shape:
    """Of both products: rows of a tile, features of a program (gate_up has so many of each), columns of a
    step.
    """

    rows: int
    gate_up: int
    down: int
    step: int
    warps: int
    stages: int


FEW = Shape(16, 32, 64, 128, 4, 4)
SOME = Shape(32, 64, 128, 64, 4, 4)
MORE = Shape(64, 64, 128, 64, 4, 4)
MANY = Shape(128, 128, 256, 64, 8, 3)
WIDE = Shape(32, 32, 64, 32, 4, 3)
SCALED = (Shape(16, 32, 64, 128, 4, 3), Shape(64, 64, 128, 128, 8, 3))


def shape_for(pairs: int, experts: ExpertWeights, dtype: torch.dtype) -> Shape:
    """Tiles about as high as an expert has rows on average."""
    average = pairs / experts.count
    if experts.layout == FP8_BLOCK:
        return SCALED[average > 24]
    if dtype == torch.float32:
        return WIDE
    if average <= 12:
        return FEW
    if average <= 24:
        return SOME
    return MORE if average <= 96 else MANY


@register("route", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def route(
    logits: Tensor, routing: Routing, bias: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `quickturn_kernels.route`."""
    return launch_route(logits, routing, bias, positions)


@register(
    "moe",
    name="triton",
    platform=TRITON,
    dtypes=FLOATS,
    traits={"layout": {PLAIN, FP8_BLOCK}},
    priority=Priority.PORTABLE,
)
def moe(
    x: Tensor, experts: ExpertWeights, weights: Tensor, chosen: Tensor, shared: SharedExpert | None
) -> Tensor:
    """See `quickturn_kernels.moe`. The choice of tiles depends on T * k / E."""
    if x.stride(1) != 1:
        x = x.contiguous()
    chosen, weights = chosen.contiguous(), weights.contiguous()
    if x.shape[0] == 0:
        return torch.empty_like(x)
    shape = shape_for(chosen.numel(), experts, x.dtype)
    tiles = make_tiles(chosen, experts.count, shape.rows)
    results = down(gate_up(x, experts, tiles, chosen.shape[1], shape), experts, tiles, shape)
    return combine(x, results, weights, chosen, experts.count, shared)


def gate_up(
    x: Tensor,
    experts: ExpertWeights,
    tiles: Tiles,
    slots: int,
    shape: Shape,
    shared: Tensor | None = None,
    *,
    early: bool = False,
) -> Tensor:
    """[T * slots, I]: each pair's gate and up, activated; pair number token * slots + j is row token of x.

    shared: [2I, H], the weight of expert number E. early: it may start before the launches ahead have
    finished, and the next one before it has, but not before those ahead have.
    """
    features, columns = experts.intermediate, experts.hidden
    inner = torch.empty((x.shape[0] * slots, features), dtype=x.dtype, device=x.device)
    gate_up_kernel[(tiles.most * triton.cdiv(features, shape.gate_up),)](
        x,
        experts.gate_up,
        shared,
        experts.gate_up_scale,
        experts.gate_up_bias,
        inner,
        tiles.experts,
        tiles.pairs,
        tiles.used,
        x.stride(0),
        columns,
        features,
        experts.count,
        TOP=slots,
        GPT_OSS=experts.activation == "gpt_oss",
        SCALED=experts.gate_up_scale is not None,
        HAS_BIAS=experts.gate_up_bias is not None,
        HAS_SHARED=shared is not None,
        EARLY=early,
        EVEN=columns % shape.step == 0,
        ROWS=shape.rows,
        BLOCK_N=shape.gate_up,
        BLOCK_K=shape.step,
        UPCAST=INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **_launched(early),
    )
    return inner


def down(
    inner: Tensor,
    experts: ExpertWeights,
    tiles: Tiles,
    shape: Shape,
    shared: Tensor | None = None,
    *,
    early: bool = False,
) -> Tensor:
    """[T * slots, H]: each pair's result.

    shared: [H, I], the weight of expert number E. early: as for `gate_up`, which must be the launch ahead.
    """
    features, columns = experts.hidden, experts.intermediate
    results = torch.empty((inner.shape[0], features), dtype=inner.dtype, device=inner.device)
    down_kernel[(tiles.most * triton.cdiv(features, shape.down),)](
        inner,
        experts.down,
        shared,
        experts.down_scale,
        experts.down_bias,
        results,
        tiles.experts,
        tiles.pairs,
        tiles.used,
        columns,
        features,
        experts.count,
        SCALED=experts.down_scale is not None,
        HAS_BIAS=experts.down_bias is not None,
        HAS_SHARED=shared is not None,
        EARLY=early,
        EVEN=columns % shape.step == 0,
        ROWS=shape.rows,
        BLOCK_N=shape.down,
        BLOCK_K=shape.step,
        UPCAST=INTERPRETED,
        num_warps=shape.warps,
        num_stages=shape.stages,
        **_launched(early),
    )
    return results


def _launched(early: bool) -> dict[str, bool]:
    """Triton's launch option, which its interpreter doesn't know."""
    return {"launch_pdl": True} if early else {}


def combine(
    x: Tensor,
    results: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: int,
    shared: SharedExpert | None,
) -> Tensor:
    """The weighted sum of the pairs' `results` [T * k, H], and the shared expert, which is computed here."""
    tokens, width = x.shape
    dense = None if shared is None else linear(linear_silu_and_mul(x, shared.gate_up), shared.down)
    gate = None if shared is None else shared.gate
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block = next_power_of_two(width)
    combine_kernel[(tokens,)](
        results,
        weights,
        chosen,
        x,
        dense,
        gate,
        out,
        x.stride(0),
        experts,
        width,
        TOP=chosen.shape[1],
        HAS_SHARED=dense is not None,
        GATED=gate is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out
