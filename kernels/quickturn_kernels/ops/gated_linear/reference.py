"""The gated half as the two ops that it's made of, each in the tier that suits."""

from torch import Tensor

from quickturn_kernels.ops.activation import silu_and_mul
from quickturn_kernels.ops.linear import LinearWeight, linear
from quickturn_kernels.registry import Priority, register


@register("linear_silu_and_mul", name="reference", priority=Priority.REFERENCE)
def linear_silu_and_mul(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """See `quickturn_kernels.linear_silu_and_mul`."""
    return silu_and_mul(linear(x, weight, bias))
