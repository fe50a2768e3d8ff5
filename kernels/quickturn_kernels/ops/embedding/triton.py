"""Embedding in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, next_power_of_two


@triton.jit
def embedding_kernel(ids, weight, out, weight_stride, vocabulary, width, BLOCK: tl.constexpr):
    """One program for BLOCK columns of one token; ids outside the table give zeros."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    known = tl.where((row >= 0) & (row < vocabulary), width, 0)
    value = tl.load(weight + row * weight_stride + column, mask=column < known, other=0.0)
    tl.store(out + token * width + column, value, mask=column < width)


@register("embedding", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `quickturn_kernels.embedding`."""
    tokens, width = ids.shape[0], weight.shape[1]
    out = torch.empty((tokens, width), dtype=weight.dtype, device=weight.device)
    if tokens > 0:
        block = min(1024, next_power_of_two(width))
        embedding_kernel[(tokens, triton.cdiv(width, block))](
            ids.contiguous(), weight, out, weight.stride(0), weight.shape[0], width, BLOCK=block, num_warps=4
        )
    return out
