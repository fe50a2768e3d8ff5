"""The gated first half of a feed-forward layer on the CPU: two kernels, one call."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import register_native
from quickturn_kernels.ops.activation.cpu import silu_and_mul
from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.linear.cpu import QUANTIZED, TILES, linear, linear_tiles


@register_native("linear_silu_and_mul", traits={"layout": {PLAIN}})
def linear_silu_and_mul(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """See `quickturn_kernels.linear_silu_and_mul`."""
    return silu_and_mul(linear(x, weight, bias, None))


@register_native(
    "linear_silu_and_mul",
    name="cpu-tiles",
    dtypes=(torch.bfloat16,),
    traits={"layout": {TILES, *QUANTIZED}},
)
def linear_silu_and_mul_tiles(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """See `quickturn_kernels.linear_silu_and_mul`."""
    return silu_and_mul(linear_tiles(x, weight, bias, None))
