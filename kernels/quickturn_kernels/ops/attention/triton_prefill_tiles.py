"""The inner loops of prefill attention: online softmax over tiles of keys (Dao 2023, FlashAttention-2).

Keys come through pointers, one for each key, or through tensor descriptors: then the copy engine (Hopper's
TMA) brings whole pages, and the registers that pointers would take are free.
"""

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
    DESCRIBED: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Over the key tiles tile_start .. tile_end - 1; k_cache and v_cache are pointers, or descriptors when
    DESCRIBED.
    """
    dim = tl.arange(0, HEAD_PAD)
    column = tl.arange(0, BLOCK_N)
    for tile in tl.range(tile_start, tile_end, num_stages=STAGES):
        start = tile * BLOCK_N
        # Memory past the context, or behind the window, may hold anything, NaN included.
        real = (start + column >= key_start) & (start + column < key_end)
        if DESCRIBED:
            page = tl.load(table + start // BLOCK_TOKENS)
            key = k_cache.load([page, start % BLOCK_TOKENS, head * HEAD_DIM]).reshape(BLOCK_N, HEAD_DIM)
            value = v_cache.load([page, start % BLOCK_TOKENS, head * HEAD_DIM]).reshape(BLOCK_N, HEAD_DIM)
        else:
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
        if DESCRIBED and MASKED:
            value = tl.where(real[:, None], value, 0.0)
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


@triton.jit
def attend_pairs(
    sum_out,
    total,
    top,
    query,
    head,
    k_pages,
    v_pages,
    table,
    tile_start,
    pairs,
    scale_log2,
    cap_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Two tiles of visible keys a round, through descriptors: the maxima and the rescaling are paid once
    for both.
    """
    for pair in tl.range(0, pairs, num_stages=STAGES):
        first = (tile_start + 2 * pair) * BLOCK_N
        second = first + BLOCK_N
        page0 = tl.load(table + first // BLOCK_TOKENS)
        page1 = tl.load(table + second // BLOCK_TOKENS)
        key0 = (
            k_pages.load([page0, first % BLOCK_TOKENS, head * HEAD_DIM])
            .reshape(BLOCK_N, HEAD_DIM)
            .to(query.dtype)
        )
        key1 = (
            k_pages.load([page1, second % BLOCK_TOKENS, head * HEAD_DIM])
            .reshape(BLOCK_N, HEAD_DIM)
            .to(query.dtype)
        )
        scores0 = softcapped(dot(query, tl.trans(key0), UPCAST), scale_log2, cap_log2, CAPPED)
        scores1 = softcapped(dot(query, tl.trans(key1), UPCAST), scale_log2, cap_log2, CAPPED)
        new_top = tl.maximum(top, tl.maximum(tl.max(scores0, axis=1), tl.max(scores1, axis=1)))
        shrink = tl.exp2(top - new_top)
        weight0 = tl.exp2(scores0 - new_top[:, None])
        weight1 = tl.exp2(scores1 - new_top[:, None])
        total = total * shrink + tl.sum(weight0, axis=1) + tl.sum(weight1, axis=1)
        value0 = (
            v_pages.load([page0, first % BLOCK_TOKENS, head * HEAD_DIM])
            .reshape(BLOCK_N, HEAD_DIM)
            .to(query.dtype)
        )
        value1 = (
            v_pages.load([page1, second % BLOCK_TOKENS, head * HEAD_DIM])
            .reshape(BLOCK_N, HEAD_DIM)
            .to(query.dtype)
        )
        sum_out = sum_out * shrink[:, None]
        sum_out += dot(weight0.to(value0.dtype), value0, UPCAST)
        sum_out += dot(weight1.to(value1.dtype), value1, UPCAST)
        top = new_top
    return sum_out, total, top
