"""Embedding rows through the compiled CPU kernels."""

import torch
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, register_native
from quickturn_kernels.ops.linear import LinearWeight
from quickturn_kernels.ops.linear.cpu import QUANTIZED, TILES

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


@register_native("packed_embedding", dtypes=(torch.bfloat16,), traits={"layout": {TILES, *QUANTIZED}})
def packed_embedding(ids: Tensor, weight: LinearWeight) -> Tensor:
    """Rows of a table that lies in tiles. See `quickturn_kernels.embedding`."""
    rows, size = weight.shape
    out = torch.empty((ids.shape[0], size), dtype=torch.bfloat16)
    packed, count = weight.tensors[0].data_ptr(), ids.shape[0]
    if weight.layout == TILES:
        _cpu.unpack_rows(ids.data_ptr(), packed, out.data_ptr(), count, size, rows)
    else:
        _cpu.unpack_quant_rows(
            QUANTIZED[weight.layout], ids.data_ptr(), packed, out.data_ptr(), count, size, rows
        )
    return out
