"""Norms through the compiled CPU kernels."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, register_native, rows_of
from quickturn_kernels.ops.norm import reference

if AVAILABLE:
    from quickturn_kernels import _cpu


@register_native("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.rms_norm`."""
    if weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    x = rows_of(x)
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype)
    _cpu.rms_norm(
        CODES[x.dtype], x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), rows, size, x.stride(0), eps
    )
    return out


@register_native("add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.add_rms_norm`."""
    x = rows_of(x)
    rows, size = x.shape
    if not residual.is_contiguous() or weight.dtype != x.dtype:
        residual += x
        return rms_norm(residual, weight, eps)
    out = torch.empty_like(residual)
    _cpu.rms_norm(
        CODES[x.dtype],
        x.data_ptr(),
        residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        x.stride(0),
        eps,
    )
    return out
