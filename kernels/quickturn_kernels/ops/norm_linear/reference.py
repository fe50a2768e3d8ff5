"""The ops that these are made of, each in the tier that suits."""

import torch
from torch import Tensor

from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import LinearWeight, linear
from quickturn_kernels.ops.norm import rms_norm
from quickturn_kernels.registry import Priority, register


@register("norm_linear", name="reference", priority=Priority.REFERENCE)
def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """See `quickturn_kernels.norm_linear`."""
    return linear(rms_norm(x, norm_weight, eps), weight, bias, out_dtype)


@register("norm_linear_silu_and_mul", name="reference", priority=Priority.REFERENCE)
def norm_linear_silu_and_mul(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None,
) -> Tensor:
    """See `quickturn_kernels.norm_linear_silu_and_mul`."""
    return linear_silu_and_mul(rms_norm(x, norm_weight, eps), weight, bias)


@register("linear_add", name="reference", priority=Priority.REFERENCE)
def linear_add(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor) -> None:
    """See `quickturn_kernels.linear_add`."""
    residual.add_(linear(x, weight, bias))


@register("norm_linear_rows", name="reference", priority=Priority.REFERENCE)
def norm_linear_rows(weight: LinearWeight) -> int:
    """Never faster: it's the same ops."""
    return 0


@register("linear_add_rows", name="reference", priority=Priority.REFERENCE)
def linear_add_rows(weight: LinearWeight) -> int:
    """Never faster: it's the same ops."""
    return 0
