"""Gated activations through the compiled CPU kernels."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, register_native, rows_of

if AVAILABLE:
    from quickturn_kernels import _cpu


@register_native("silu_and_mul")
def silu_and_mul(x: Tensor) -> Tensor:
    """See `quickturn_kernels.silu_and_mul`."""
    x = rows_of(x)
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype)
    _cpu.silu_and_mul(CODES[x.dtype], x.data_ptr(), out.data_ptr(), rows, size, x.stride(0))
    return out
