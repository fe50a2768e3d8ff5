"""The gated first half of a feed-forward layer on the CPU: two kernels, one call."""

from torch import Tensor

from quickturn_kernels.cpu_native import register_native
from quickturn_kernels.ops.activation.cpu import silu_and_mul
from quickturn_kernels.ops.linear import LinearWeight
from quickturn_kernels.ops.linear.cpu import LAYOUTS, linear


@register_native("linear_silu_and_mul", traits={"layout": LAYOUTS})
def linear_silu_and_mul(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """See `quickturn_kernels.linear_silu_and_mul`."""
    return silu_and_mul(linear(x, weight, bias, None))
