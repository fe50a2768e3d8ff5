"""Gated activations in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, next_power_of_two


@triton.jit
def silu_and_mul_kernel(x, out, x_stride, width, BLOCK: tl.constexpr):
    """One program for BLOCK columns of one row; silu is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@register("silu_and_mul", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def silu_and_mul(x: Tensor) -> Tensor:
    """See `quickturn_kernels.silu_and_mul`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows > 0:
        block = min(1024, next_power_of_two(width))
        silu_and_mul_kernel[(rows, triton.cdiv(width, block))](
            x, out, x.stride(0), width, BLOCK=block, num_warps=4
        )
    return out
