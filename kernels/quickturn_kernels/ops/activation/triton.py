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


@triton.jit
def gelu_tanh_and_mul_kernel(x, out, x_stride, width, BLOCK: tl.constexpr):
    """As `silu_and_mul_kernel`; (1 + tanh(u)) / 2 = sigmoid(2u)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    activated = (gate * tl.sigmoid(2.0 * inner)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (activated * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sigmoid_gate_kernel(x, gate, out, x_stride, gate_stride, width, BLOCK: tl.constexpr):
    """One program for BLOCK columns of one row; the sigmoid is rounded before the product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.sigmoid(opening).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (value * factor).to(out.dtype.element_ty), mask=inside)


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


@register("gelu_tanh_and_mul", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `quickturn_kernels.gelu_tanh_and_mul`."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows > 0:
        block = min(1024, next_power_of_two(width))
        gelu_tanh_and_mul_kernel[(rows, triton.cdiv(width, block))](
            x, out, x.stride(0), width, BLOCK=block, num_warps=4
        )
    return out


@register("sigmoid_gate", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `quickturn_kernels.sigmoid_gate`."""
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows > 0:
        block = min(1024, next_power_of_two(width))
        sigmoid_gate_kernel[(rows, triton.cdiv(width, block))](
            x, gate, out, x.stride(0), gate.stride(0), width, BLOCK=block, num_warps=4
        )
    return out
