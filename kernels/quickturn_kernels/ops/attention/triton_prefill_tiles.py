"""The inner loop of prefill attention: online softmax over tiles of keys (Dao 2023, FlashAttention-2)."""

import triton
import triton.language as tl

from quickturn_kernels.ops.attention.triton_common import block_rows, dot, elements, softcapped


@triton.jit
def attend(
    sum_out,
    total,
    top,
    query,
    position,
    head,
    k_cache,
    v_cache,
    table,
    tile_start,
    tile_end,
    key_start,
    key_end,
    window,
    scale_log2,
    cap_log2,
    k_block_stride,
    k_row_stride,
    v_block_stride,
    v_row_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Over the key tiles tile_start .. tile_end - 1."""
    dim = tl.arange(0, HEAD_PAD)
    column = tl.arange(0, BLOCK_N)
    for tile in tl.range(tile_start, tile_end, num_stages=STAGES):
        start = tile * BLOCK_N
        # Memory past the context, or behind the window, may hold anything, NaN included.
        real = (start + column >= key_start) & (start + column < key_end)
        block, offset = block_rows(table, start, key_end, BLOCK_TOKENS, BLOCK_N)
        key_at = k_cache + block * k_block_stride + head * HEAD_DIM + offset * k_row_stride
        value_at = v_cache + block * v_block_stride + head * HEAD_DIM + offset * v_row_stride
        if MASKED or HEAD_PAD != HEAD_DIM:
            wanted = elements(real, dim, HEAD_DIM)
            key = tl.load(key_at[:, None] + dim[None, :], mask=wanted, other=0.0)
            value = tl.load(value_at[:, None] + dim[None, :], mask=wanted, other=0.0)
        else:
            key = tl.load(key_at[:, None] + dim[None, :])
            value = tl.load(value_at[:, None] + dim[None, :])
        key = key.to(query.dtype)
        value = value.to(query.dtype)
        scores = softcapped(dot(query, tl.trans(key), UPCAST), scale_log2, cap_log2, CAPPED)
        if MASKED:
            visible = (start + column)[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & ((start + column)[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        finite_top = new_top
        if MASKED:
            finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - finite_top)
        weight = tl.exp2(scores - finite_top[:, None])
        total = total * shrink + tl.sum(weight, axis=1)
        sum_out = sum_out * shrink[:, None]
        sum_out += dot(weight.to(value.dtype), value, UPCAST)
        top = new_top
    return sum_out, total, top
