"""Ragged prefill attention over the paged cache in Triton.

One program owns a tile of BLOCK_M rows of the score matrix: BLOCK_M / GROUP consecutive tokens of one
request times the GROUP query heads of one kv head, so that keys are read once for the whole group, short
chunks fill tiles too, and few tiles lie on the diagonal. Tiles that see most keys start first. Only tiles
at the diagonal and at the window's edge are masked. A short chunk over a long context would leave
multiprocessors idle: its keys are split among programs, whose parts a second kernel adds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.ops.attention.triton_common import LOG2_E, LOG2_E_CONST, elements
from quickturn_kernels.ops.attention.triton_prefill_plan import (
    MAX_SPLITS,
    Tiles,
    pointer_tiles,
    splits_for,
)
from quickturn_kernels.ops.attention.triton_prefill_tiles import attend
from quickturn_kernels.platform import TRITON, TRITON_FP8
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import (
    FLOATS,
    INTERPRETED,
    next_power_of_two,
    rows_pad,
    shared_memory,
    units,
)

HEAD_DIMS = range(1, 257)


# Lengths of the batch must not make variants: a variant is compiled when first met, which takes seconds.
@triton.jit(do_not_specialize=["num_rows", "num_tokens", "table_stride", "splits"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    query_start,
    lens,
    sinks,
    out,
    partial_out,
    partial_stats,
    scale_log2,
    cap_log2,
    window,
    num_rows,
    num_tokens,
    splits,
    q_token_stride,
    q_head_stride,
    table_stride,
    k_block_stride,
    k_row_stride,
    v_block_stride,
    v_row_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of one row; tokens past the last row count as one more row that sees nothing, so that its
    zeros get written.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS_PAD)
    starts = tl.load(query_start + rows, mask=rows <= num_rows, other=num_tokens)
    ends = tl.load(query_start + rows + 1, mask=rows < num_rows, other=num_tokens)
    tile_ends = tl.cumsum(tl.cdiv(tl.maximum(ends - starts, 0), TOKENS), axis=0)
    row = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    if row <= num_rows:
        first_token = tl.load(query_start + row)
        length = tl.sum(tl.where(rows == row, ends, 0), axis=0) - first_token
        row_tiles = tl.cdiv(length, TOKENS)
        row_tile = tile - (tl.sum(tl.where(rows == row, tile_ends, 0), axis=0) - row_tiles)
        context = tl.load(lens + row, mask=row < num_rows, other=0)

        line = tl.arange(0, BLOCK_M)
        dim = tl.arange(0, HEAD_PAD)
        query_index = row_tile * TOKENS + line // GROUP
        inside = (query_index < length) & (line < TOKENS * GROUP)
        position = context - length + query_index
        token = (first_token + query_index).to(tl.int64)
        query_head = head * GROUP + line % GROUP
        query_at = q + (token * q_token_stride + query_head * q_head_stride)[:, None] + dim[None, :]
        queries = elements(inside, dim, HEAD_DIM)
        query = tl.load(query_at, mask=queries, other=0.0)

        first_position = context - length + row_tile * TOKENS
        key_end = tl.minimum(context, first_position + TOKENS)
        key_start = 0
        tile_start = 0
        unmasked_start = 0
        if WINDOW:
            key_start = tl.maximum(first_position - window + 1, 0)
            tile_start = key_start // BLOCK_N
            unmasked_start = tl.cdiv(tl.maximum(key_end - window, 0), BLOCK_N)
        tile_end = tl.where(context > 0, tl.cdiv(key_end, BLOCK_N), tile_start)
        unmasked_end = tl.maximum(first_position + 1, 0) // BLOCK_N
        if SPLIT:
            share = tl.cdiv(tile_end - tile_start, splits)
            tile_start += split * share
            tile_end = tl.minimum(tile_start + share, tile_end)
        unmasked_start = tl.minimum(tl.maximum(unmasked_start, tile_start), tl.maximum(tile_start, tile_end))
        unmasked_end = tl.minimum(
            tl.maximum(unmasked_end, unmasked_start), tl.maximum(unmasked_start, tile_end)
        )

        table = tables + row.to(tl.int64) * table_stride
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sum_out = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        if WINDOW:
            sum_out, total, top = attend(
                sum_out, total, top, query, position, head, k_cache, v_cache, table,
                tile_start, unmasked_start,
                key_start, key_end, window, scale_log2, cap_log2,
                k_block_stride, k_row_stride, v_block_stride, v_row_stride,
                HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, BLOCK_N, True, WINDOW, CAPPED, STAGES, UPCAST,
            )  # fmt: skip
        sum_out, total, top = attend(
            sum_out, total, top, query, position, head, k_cache, v_cache, table,
            unmasked_start, unmasked_end,
            key_start, key_end, window, scale_log2, cap_log2,
            k_block_stride, k_row_stride, v_block_stride, v_row_stride,
            HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, BLOCK_N, False, WINDOW, CAPPED, STAGES, UPCAST,
        )  # fmt: skip
        sum_out, total, top = attend(
            sum_out, total, top, query, position, head, k_cache, v_cache, table,
            unmasked_end, tile_end,
            key_start, key_end, window, scale_log2, cap_log2,
            k_block_stride, k_row_stride, v_block_stride, v_row_stride,
            HEAD_DIM, HEAD_PAD, BLOCK_TOKENS, BLOCK_N, True, WINDOW, CAPPED, STAGES, UPCAST,
        )  # fmt: skip

        target = token * (KV_HEADS * GROUP) + query_head
        if not SPLIT:
            if SINKS:
                sink = tl.load(sinks + query_head).to(tl.float32) * LOG2_E_CONST
                new_top = tl.maximum(top, sink)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.exp2(sink - new_top)
                sum_out = sum_out * shrink[:, None]
            result = sum_out / tl.where(total > 0.0, total, 1.0)[:, None]
            result_at = out + target[:, None] * HEAD_DIM + dim[None, :]
            tl.store(result_at, result.to(out.dtype.element_ty), mask=queries)
        else:
            slot = split.to(tl.int64) * num_tokens * (KV_HEADS * GROUP) + target
            tl.store(partial_stats + slot * 2, top, mask=inside)
            tl.store(partial_stats + slot * 2 + 1, total, mask=inside)
            tl.store(partial_out + slot[:, None] * HEAD_DIM + dim[None, :], sum_out, mask=queries)


@triton.jit(do_not_specialize=["lines", "splits"])
def combine_kernel(
    partial_out,
    partial_stats,
    sinks,
    out,
    lines,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add up the splits of one (token, head); `lines` is tokens times heads."""
    line = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, HEAD_PAD)
    slot = split * lines + line
    top = tl.load(partial_stats + slot * 2, mask=split < splits, other=float("-inf"))
    total = tl.load(partial_stats + slot * 2 + 1, mask=split < splits, other=0.0)
    best = tl.max(top, axis=0)
    sink_weight = 0.0
    if SINKS:
        sink = tl.load(sinks + line % HEADS).to(tl.float32) * LOG2_E_CONST
        best = tl.maximum(best, sink)
        sink_weight = tl.exp2(sink - best)
    weight = tl.where(total > 0.0, tl.exp2(top - best), 0.0)
    values = tl.load(
        partial_out + slot[:, None] * HEAD_DIM + dim[None, :],
        mask=elements(split < splits, dim, HEAD_DIM),
        other=0.0,
    )
    summed = tl.sum(total * weight, axis=0) + sink_weight
    result = tl.sum(values * weight[:, None], axis=0) / tl.where(summed > 0.0, summed, 1.0)
    tl.store(out + line * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@register(
    "paged_attention_prefill",
    name="triton_fp8",
    platform=TRITON_FP8,
    dtypes=FLOATS,
    traits={"head_dim": HEAD_DIMS, "cache": {FP8}},
    priority=Priority.PORTABLE,
)
@register(
    "paged_attention_prefill",
    name="triton",
    platform=TRITON,
    dtypes=FLOATS,
    traits={"head_dim": HEAD_DIMS, "cache": {SAME}},
    priority=Priority.PORTABLE,
)
def paged_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.paged_attention_prefill`."""
    score_rows = max_query_len * (q.shape[1] // k_cache.shape[2])
    tiles = pointer_tiles(_padded(q.shape[2]), q.element_size(), score_rows, shared_memory(q.device))
    options = (window, sinks, softcap, max_context_len)
    return _launch(q, k_cache, v_cache, block_tables, query_start, context_lens, scale, *options, tiles)


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    max_context_len: int,
    tiles: Tiles,
) -> Tensor:
    tokens, heads, head_dim = q.shape
    head_pad = _padded(head_dim)
    rows = context_lens.shape[0]
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    block_m = max(tiles.block_m, next_power_of_two(group))
    # Each row, and the padding after them, may end in a tile that isn't full.
    count = tokens // (block_m // group) + rows + 1
    splits = splits_for(count * kv_heads, window, max_context_len, units(q.device))
    lines = tokens * heads
    floats = splits * lines * (head_dim + 2) if splits > 1 else 0
    partial = torch.empty(floats, dtype=torch.float32, device=q.device)
    stats = partial[splits * lines * head_dim :] if splits > 1 else partial
    prefill_kernel[(count, kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_start.contiguous(),
        context_lens.contiguous(),
        sinks,
        out,
        partial,
        stats,
        scale * LOG2_E,
        softcap * LOG2_E,
        window,
        rows,
        tokens,
        splits,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_TOKENS=block_tokens,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
        ROWS_PAD=rows_pad(rows + 1),
        SPLIT=splits > 1,
        WINDOW=window > 0,
        SINKS=sinks is not None,
        CAPPED=softcap > 0.0,
        STAGES=tiles.stages,
        UPCAST=INTERPRETED,
        num_warps=tiles.warps,
    )
    if splits > 1:
        combine_kernel[(lines,)](
            partial,
            stats,
            sinks,
            out,
            lines,
            splits,
            HEADS=heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=head_pad,
            MAX_SPLITS=MAX_SPLITS,
            SINKS=sinks is not None,
            num_warps=1 if head_dim <= 128 else 2,
        )
    return out


def _padded(head_dim: int) -> int:
    """A head as matrix products take it."""
    return max(16, next_power_of_two(head_dim))
