"""The ops that these are made of, each in the tier that suits."""

import torch
from torch import Tensor

from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import LinearWeight, linear
from quickturn_kernels.ops.norm import add_rms_norm, rms_norm
from quickturn_kernels.registry import Priority, register


@register("norm_linear", name="reference", priority=Priority.REFERENCE)
def norm_linear(
    residual: Tensor,
    branch: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """See `quickturn_kernels.norm_linear`."""
    return linear(_normed(residual, branch, norm_weight, eps), weight, bias, out_dtype)


@register("norm_linear_silu_and_mul", name="reference", priority=Priority.REFERENCE)
def norm_linear_silu_and_mul(
    residual: Tensor,
    branch: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None,
) -> Tensor:
    """See `quickturn_kernels.norm_linear_silu_and_mul`."""
    return linear_silu_and_mul(_normed(residual, branch, norm_weight, eps), weight, bias)


@register("linear_add", name="reference", priority=Priority.REFERENCE)
def linear_add(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor, branch: Tensor | None
) -> None:
    """See `quickturn_kernels.linear_add`."""
    if branch is not None:
        residual.add_(branch)
    residual.add_(linear(x, weight, bias))


@register("norm_linear_rows", name="reference", priority=Priority.REFERENCE)
def norm_linear_rows(weight: LinearWeight) -> int:
    """Never faster: it's the same ops."""
    return 0


@register("linear_add_rows", name="reference", priority=Priority.REFERENCE)
def linear_add_rows(weight: LinearWeight) -> int:
    """Never faster: it's the same ops."""
    return 0


def _normed(residual: Tensor, branch: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if branch is None:
        return rms_norm(residual, weight, eps)
    return add_rms_norm(branch, residual.clone(), weight, eps)
