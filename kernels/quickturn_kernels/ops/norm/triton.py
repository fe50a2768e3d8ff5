"""Norms in Triton: one program a row, the row held in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, next_power_of_two


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    """out[row] = norm(x[row]); with ADD the sum of both is first stored to residual, and normed as rounded
    there.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        kept = residual + row * residual_stride + column
        value += tl.load(kept, mask=inside, other=0.0).to(tl.float32)
        value = value.to(residual.dtype.element_ty)
        tl.store(kept, value, mask=inside)
        value = value.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / width
    normed = value * tl.rsqrt(mean + eps)
    if weight.dtype.element_ty != tl.float32:
        normed = normed.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (normed * scale).to(out.dtype.element_ty), mask=inside)


@register("rms_norm", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.rms_norm`."""
    return _launch(x, x, weight, eps, add=False)


@register("add_rms_norm", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.add_rms_norm`."""
    return _launch(x, residual, weight, eps, add=True)


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows > 0:
        block = next_power_of_two(width)
        rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            x.stride(0),
            residual.stride(0),
            width,
            eps,
            ADD=add,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )
    return out
