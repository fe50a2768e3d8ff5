"""Embedding rows through the compiled CPU kernels."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, register_native

if AVAILABLE:
    from quickturn_kernels import _cpu


@register_native("embedding")
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `quickturn_kernels.embedding`."""
    weight = weight.contiguous()
    rows, size = weight.shape
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype)
    _cpu.gather_rows(
        ids.data_ptr(), weight.data_ptr(), out.data_ptr(), ids.shape[0], size * weight.element_size(), rows
    )
    return out
