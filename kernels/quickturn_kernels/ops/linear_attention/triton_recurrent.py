"""The delta rule with a decay for each key channel over prompts, token by token, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.ops.linear_attention.triton_common import exponential, gates
from quickturn_kernels.triton_common import next_power_of_two

STATE_ELEMENTS = 2048
"""Of a program's part of a state: little, because a token's time is that of its slowest step."""


@triton.jit
def recurrent_kernel(
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
    query_start,
    kept_start,
    kept_tokens,
    kept_rows,
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
    KEEPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """All tokens of one row, for some columns of one head's state."""
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    heads = tl.num_programs(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_key, in_value = key < KEY_DIM, value < VALUE_DIM
    start, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if start == end:
        return
    place = out + head * VALUE_DIM + value
    target = tl.load(state_out + row).to(tl.int64)
    if target < 0:
        for token in range(start, end):
            zero = tl.zeros((BLOCK_V,), dtype=out.dtype.element_ty)
            tl.store(place + tl.cast(token, tl.int64) * heads * VALUE_DIM, zero, mask=in_value)
        return
    source = tl.load(state_in + row).to(tl.int64)
    reading = (source >= 0) & (tl.load(state_zero + row) == 0)
    at_state = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    # A bound instead of a flag: the interpreter can't mask by a scalar.
    readable = (key < tl.where(reading, KEY_DIM, 0))[:, None] & in_value[None, :]
    state = tl.load(states + source * block_stride + at_state, mask=readable, other=0.0).to(tl.float32)
    inside = in_key[:, None] & in_value[None, :]
    rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head * KEY_DIM + key, mask=in_key, other=0.0).to(tl.float32)
    group = head // GROUP
    kept, kept_end = 0, 0
    if KEEPS:
        kept, kept_end = tl.load(kept_start + row), tl.load(kept_start + row + 1)
    for token in range(start, end):
        at = tl.cast(token, tl.int64)
        this_q = tl.load(q + at * q_stride + group * q_head_stride + key, mask=in_key, other=0.0).to(
            tl.float32
        )
        this_k = tl.load(k + at * k_stride + group * k_head_stride + key, mask=in_key, other=0.0).to(
            tl.float32
        )
        this_v = tl.load(v + at * v_stride + head * v_head_stride + value, mask=in_value, other=0.0)
        this_a = tl.load(a + at * a_stride + head * a_head_stride + key, mask=in_key, other=0.0)
        this_b = tl.load(b + at * b_stride + head).to(tl.float32)
        decay, beta = gates(this_a.to(tl.float32), this_b, rate, bias)
        this_q *= tl.rsqrt(tl.sum(this_q * this_q, axis=0) + 1e-6) * scale
        this_k *= tl.rsqrt(tl.sum(this_k * this_k, axis=0) + 1e-6)
        state *= exponential(decay)[:, None]
        known = tl.sum(state * this_k[:, None], axis=0)
        state += this_k[:, None] * (beta * (this_v.to(tl.float32) - known))[None, :]
        result = tl.sum(state * this_q[:, None], axis=0)
        tl.store(place + at * heads * VALUE_DIM, result.to(out.dtype.element_ty), mask=in_value)
        if KEEPS:
            while (kept < kept_end) and (
                tl.load(kept_tokens + kept, mask=kept < kept_end, other=0) <= token + 1 - start
            ):
                block = tl.load(kept_rows + kept).to(tl.int64)
                tl.store(
                    states + block * block_stride + at_state, state.to(states.dtype.element_ty), mask=inside
                )
                kept += 1
    tl.store(states + target * block_stride + at_state, state.to(states.dtype.element_ty), mask=inside)


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
    query_start: Tensor,
    scale: float,
    boundaries: Boundaries | None,
) -> Tensor:
    """See `quickturn_kernels.gated_delta_prefill`; a is [T, Hv, Dk]."""
    _, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    rows = state_in.shape[0]
    out = torch.empty(v.shape, dtype=q.dtype, device=q.device)
    block_k = next_power_of_two(key_dim)
    block_v = min(next_power_of_two(value_dim), max(8, STATE_ELEMENTS // block_k))
    kept = (query_start,) * 3
    if boundaries is not None:
        kept = (boundaries.row_start, boundaries.tokens, boundaries.rows)
    recurrent_kernel[(triton.cdiv(value_dim, block_v), heads, rows)](
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
        query_start,
        *kept,
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
        KEEPS=boundaries is not None,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=1,
    )
    return out
