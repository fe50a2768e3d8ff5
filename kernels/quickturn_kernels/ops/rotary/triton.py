"""Rotary, head norms and cache write in one Triton kernel: one program a token and kv head."""

import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.platform import TRITON, TRITON_FP8
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, INTERPRETED, next_power_of_two
from quickturn_kernels.triton_fp8 import to_e4m3


@triton.jit
def _scaled(value, scale, weight, like):
    """value * scale * weight, rounded to the dtype of `like` after each product, or, if weight is float32,
    after the last; as float32.
    """
    dtype = like.dtype.element_ty
    normed = value * scale
    if weight.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _to_cache(value, source, target, scale, ROUND: tl.constexpr):
    """float32 rounded to the dtype of `source`, and then as elements of `target`; in e4m3 over `scale`."""
    rounded = value.to(source.dtype.element_ty)
    if target.dtype.element_ty == tl.float8e4nv:
        narrow = tl.clamp(tl.div_rn(rounded.to(tl.float32), scale), -448.0, 448.0)
        return to_e4m3(narrow, target, ROUND)
    return rounded.to(target.dtype.element_ty)


@triton.jit
def _norm_and_rotate(
    source,
    target,
    weight,
    cos,
    sin,
    kept,
    eps,
    cache_scale,
    NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Heads at the pointers source [N, 1] to target [N, 1]; kept [N, 1] masks them, cos and sin are [1,
    HALF_PAD].
    """
    low = tl.arange(0, HALF_PAD)[None, :]
    inside = low < HALF
    turning = kept & inside
    first = tl.load(source + low, mask=turning, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + low, mask=turning, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        staying = kept & (rest < HEAD_DIM)
        third = tl.load(source + rest, mask=staying, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(third * third, axis=1)
    if NORM:
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = _scaled(first, scale, tl.load(weight + low, mask=inside, other=0.0), source)
        second = _scaled(second, scale, tl.load(weight + HALF + low, mask=inside, other=0.0), source)
        if 2 * HALF < HEAD_DIM:
            third = _scaled(third, scale, tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0), source)
    # The cache may be narrower than the model: rounded to the model's dtype first, as the reference does.
    turned = _to_cache(first * cos - second * sin, source, target, cache_scale, ROUND)
    tl.store(target + low, turned, mask=turning)
    turned = _to_cache(second * cos + first * sin, source, target, cache_scale, ROUND)
    tl.store(target + HALF + low, turned, mask=turning)
    if 2 * HALF < HEAD_DIM:
        tl.store(target + rest, _to_cache(third, source, target, cache_scale, ROUND), mask=staying)


@triton.jit
def rotary_cache_write_kernel(
    q,
    k,
    v,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    slots,
    q_weight,
    k_weight,
    eps,
    k_scale,
    v_scale,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cos_sin_stride,
    k_block_stride,
    k_row_stride,
    v_block_stride,
    v_row_stride,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    NORM: tl.constexpr,
    ROUND: tl.constexpr,
):
    """The GROUP query heads of one kv head, that kv head's key, and its value."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        low = tl.arange(0, HALF_PAD)[None, :]
        angles = cos_sin + tl.load(positions + token) * cos_sin_stride + low
        cos = tl.load(angles, mask=low < HALF, other=0.0)
        sin = tl.load(angles + HALF, mask=low < HALF, other=0.0)
        member = tl.arange(0, GROUP_PAD)[:, None]
        queries = q + token * q_token_stride + (head * GROUP + member) * q_head_stride
        _norm_and_rotate(
            queries,
            queries,
            q_weight,
            cos,
            sin,
            member < GROUP,
            eps,
            1.0,
            NORM,
            HEAD_DIM,
            HALF,
            HALF_PAD,
            REST_PAD,
            ROUND,
        )
        block = slot // BLOCK_TOKENS
        offset = slot % BLOCK_TOKENS
        one = tl.arange(0, 1)[:, None]
        key = k + token * k_token_stride + head * k_head_stride + one
        key_target = k_cache + block * k_block_stride + offset * k_row_stride + head * HEAD_DIM + one
        _norm_and_rotate(
            key,
            key_target,
            k_weight,
            cos,
            sin,
            one == 0,
            eps,
            k_scale,
            NORM,
            HEAD_DIM,
            HALF,
            HALF_PAD,
            REST_PAD,
            ROUND,
        )
        dim = tl.arange(0, HEAD_PAD)
        value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=dim < HEAD_DIM)
        value_target = v_cache + block * v_block_stride + offset * v_row_stride + head * HEAD_DIM + dim
        kept_value = _to_cache(value.to(tl.float32), v, v_cache, v_scale, ROUND)
        tl.store(value_target, kept_value, mask=dim < HEAD_DIM)


@register(
    "rotary_cache_write",
    name="triton_fp8",
    platform=TRITON_FP8,
    dtypes=FLOATS,
    traits={"cache": {FP8}},
    priority=Priority.PORTABLE,
)
@register(
    "rotary_cache_write",
    name="triton",
    platform=TRITON,
    dtypes=FLOATS,
    traits={"cache": {SAME}},
    priority=Priority.PORTABLE,
)
def rotary_cache_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """See `quickturn_kernels.rotary_cache_write`. Both head norms, or neither."""
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must be given together")
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    half = cos_sin.shape[1] // 2
    if tokens == 0:
        return
    rotary_cache_write_kernel[(tokens, kv_heads)](
        q,
        k,
        v,
        positions.contiguous(),
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping.contiguous(),
        q_weight,
        k_weight,
        eps,
        k_scale,
        v_scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        BLOCK_TOKENS=k_cache.shape[1],
        GROUP=heads // kv_heads,
        GROUP_PAD=next_power_of_two(heads // kv_heads),
        HEAD_DIM=head_dim,
        HEAD_PAD=next_power_of_two(head_dim),
        HALF=half,
        HALF_PAD=next_power_of_two(half),
        REST_PAD=next_power_of_two(head_dim - 2 * half),
        NORM=q_weight is not None,
        ROUND=INTERPRETED,
        num_warps=1 if head_dim * (heads // kv_heads) <= 1024 else 4,
    )
