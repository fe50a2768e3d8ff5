"""Norms in plain PyTorch."""

import torch
from torch import Tensor

from quickturn_kernels.registry import Priority, register


@register("rms_norm", name="reference", priority=Priority.REFERENCE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (wide * weight).to(x.dtype)
    return wide.to(x.dtype) * weight.to(x.dtype)


@register("add_rms_norm", name="reference", priority=Priority.REFERENCE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
