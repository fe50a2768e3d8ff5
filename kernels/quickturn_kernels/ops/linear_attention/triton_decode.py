"""One token of the gated delta rule, and the gated norm, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.linear_attention.triton_common import exponential, gates, silu
from quickturn_kernels.triton_common import next_power_of_two

STATE_ELEMENTS = 8192
"""Of a program's part of a state; 128 threads hold 64 each."""

NORM_ELEMENTS = 2048
"""Of a program's lines."""


@triton.jit
def decode_kernel(
    q,
    k,
    v,
    a,
    b,
    a_log,
    dt_bias,
    states,
    state_in,
    state_out,
    state_zero,
    out,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    a_stride,
    a_head_stride,
    b_stride,
    block_stride,
    CHANNELWISE: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Some columns of one head's state of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    place = out + (row * heads + head) * VALUE_DIM + value
    target = tl.load(state_out + row).to(tl.int64)
    if target < 0:
        tl.store(place, tl.zeros((BLOCK_V,), dtype=out.dtype.element_ty), mask=in_value)
        return
    source = tl.load(state_in + row).to(tl.int64)
    reading = (source >= 0) & (tl.load(state_zero + row) == 0)
    at = head.to(tl.int64) * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    inside = in_key[:, None] & in_value[None, :]
    # A bound instead of a flag: the interpreter can't mask by a scalar.
    readable = (key < tl.where(reading, KEY_DIM, 0))[:, None] & in_value[None, :]
    state = tl.load(states + source * block_stride + at, mask=readable, other=0.0).to(tl.float32)
    group = head // GROUP
    this_q = tl.load(q + row * q_stride + group * q_head_stride + key, mask=in_key, other=0.0).to(tl.float32)
    this_k = tl.load(k + row * k_stride + group * k_head_stride + key, mask=in_key, other=0.0).to(tl.float32)
    this_v = tl.load(v + row * v_stride + head * v_head_stride + value, mask=in_value, other=0.0)
    this_q *= tl.rsqrt(tl.sum(this_q * this_q, axis=0) + 1e-6) * scale
    this_k *= tl.rsqrt(tl.sum(this_k * this_k, axis=0) + 1e-6)
    if CHANNELWISE:
        this_a = tl.load(a + row * a_stride + head * a_head_stride + key, mask=in_key, other=0.0).to(
            tl.float32
        )
        bias = tl.load(dt_bias + head * KEY_DIM + key, mask=in_key, other=0.0).to(tl.float32)
    else:
        this_a = tl.load(a + row * a_stride + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32)
    this_b = tl.load(b + row * b_stride + head).to(tl.float32)
    decay, beta = gates(this_a, this_b, tl.load(a_log + head).to(tl.float32), bias)
    if CHANNELWISE:
        state *= exponential(decay)[:, None]
    else:
        state *= exponential(decay)
    known = tl.sum(state * this_k[:, None], axis=0)
    state += this_k[:, None] * (beta * (this_v.to(tl.float32) - known))[None, :]
    tl.store(place, tl.sum(state * this_q[:, None], axis=0).to(out.dtype.element_ty), mask=in_value)
    tl.store(states + target * block_stride + at, state.to(states.dtype.element_ty), mask=inside)


@triton.jit
def gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    lines,
    inner,
    gate_stride,
    width,
    eps,
    WIDE: tl.constexpr,
    SILU: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[line] = norm(x[line]) * weight * silu(gate[line]); line i is row (i // inner, i % inner) of gate.
    WIDE: weight is float32.
    """
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    column = tl.arange(0, BLOCK)
    inside = (line < lines)[:, None] & (column < width)[None, :]
    place = line[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    at = (line // inner * gate_stride + line % inner * width)[:, None] + column[None, :]
    by = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=1) / width
    value = (value * tl.rsqrt(mean + eps)[:, None]).to(out.dtype.element_ty).to(tl.float32) * scale[None, :]
    if not WIDE:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    opened = silu(by) if SILU else 1.0 / (1.0 + exponential(-by))
    tl.store(out + place, (value * opened).to(out.dtype.element_ty), mask=inside)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    scale: float,
) -> Tensor:
    """See `quickturn_kernels.gated_delta_decode`."""
    rows, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    block_k = next_power_of_two(key_dim)
    block_v = min(next_power_of_two(value_dim), max(8, STATE_ELEMENTS // block_k))
    decode_kernel[(rows, heads, triton.cdiv(value_dim, block_v))](
        q,
        k,
        v,
        a,
        b,
        a_log,
        dt_bias,
        states,
        state_in,
        state_out,
        state_zero.view(torch.uint8),
        out,
        scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        a.stride(0),
        a.stride(1),
        b.stride(0),
        states.stride(0),
        CHANNELWISE=a.dim() == 3,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=4,
    )
    return out


def launch_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """See `quickturn_kernels.gated_rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    width = x.shape[-1]
    inner = x.shape[-2] if x.dim() > 2 else 1
    outer = x.numel() // (width * inner)
    x = x if x.is_contiguous() else x.contiguous()
    if gate.stride(-1) != 1 or (gate.dim() > 2 and gate.stride(-2) != width) or gate.dim() > 3:
        gate = gate.contiguous()
    gate_stride = gate.stride(0) if gate.dim() <= 3 and gate.dim() > 1 else width * inner
    block = next_power_of_two(width)
    lines = max(1, min(NORM_ELEMENTS // block, next_power_of_two(outer * inner)))
    gated_norm_kernel[(triton.cdiv(outer * inner, lines),)](
        x,
        gate,
        weight,
        out,
        outer * inner,
        inner,
        gate_stride,
        width,
        eps,
        WIDE=weight.dtype == torch.float32,
        SILU=activation == "silu",
        LINES=lines,
        BLOCK=block,
        num_warps=max(1, min(4, lines * block // 512)),
    )
    return out
