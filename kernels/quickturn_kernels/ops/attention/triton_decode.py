"""Paged decode attention in Triton: split-KV, balanced on the device.

The work of a step is a line of tiles of BLOCK_N keys: row by row, in a row kv head by kv head. A fixed
number of programs cut that line into equal pieces, whatever the rows' lengths, which each program reads
from the device: one long context beside many short ones keeps every multiprocessor busy, and a CUDA graph
can be replayed for any lengths. A (row, head) that one program covers whole is finished there. The parts of
the others go to a workspace, and whichever program is last to deliver a part of a (row, head) adds them up.
The query heads of one kv head are the rows of one matrix product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.ops.attention.triton_common import (
    LOG2_E,
    LOG2_E_CONST,
    block_rows,
    dot,
    elements,
    softcapped,
)
from quickturn_kernels.platform import TRITON, TRITON_FP8
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import (
    FLOATS,
    INTERPRETED,
    next_power_of_two,
    rows_pad,
    units,
    zeroed_counters,
)

HEAD_DIMS = range(1, 257)
COMBINE_PARTS: int = 8


@triton.jit
def _combine(
    partial_out,
    partial_stats,
    sinks,
    out,
    first_worker,
    parts,
    first_slot,
    head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Add up the parts of one (row, head), which lie in slot 0 of their workers, the first in its slot
    `first_slot`.
    """
    member = tl.arange(0, GROUP_PAD)
    dim = tl.arange(0, HEAD_PAD)
    inside = member < GROUP
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    sum_out = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    if SINKS:
        top = tl.load(sinks + head * GROUP + member, mask=inside, other=0.0).to(tl.float32) * LOG2_E_CONST
        total += 1.0
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        slot = (first_worker + part) * 2 + tl.where(part == 0, first_slot, 0)
        present = (part < parts)[:, None] & inside[None, :]
        stats = partial_stats + slot[:, None] * (2 * GROUP) + member[None, :]
        part_top = tl.load(stats, mask=present, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats + GROUP, mask=present, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(part_top, axis=0))
        # Only the padding of the group has no finite maximum; its values are never stored.
        weight = tl.exp2(part_top - tl.where(inside, new_top, 0.0)[None, :])
        shrink = tl.exp2(top - tl.where(inside, new_top, 0.0))
        values = (
            partial_out
            + (slot[:, None, None] * GROUP + member[None, :, None]) * HEAD_DIM
            + dim[None, None, :]
        )
        real = present[:, :, None]
        if HEAD_PAD != HEAD_DIM:
            real = real & (dim < HEAD_DIM)[None, None, :]
        loaded = tl.load(values, mask=real, other=0.0, cache_modifier=".cg")
        sum_out = sum_out * shrink[:, None] + tl.sum(loaded * weight[:, :, None], axis=0)
        total = total * shrink + tl.sum(part_total * weight, axis=0)
        top = new_top
    result = sum_out / tl.where(inside, total, 1.0)[:, None]
    _store(out, result, top, total, head, GROUP, HEAD_DIM, PARTIAL)


@triton.jit
def _store(out, result, top, total, head, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTIAL: tl.constexpr):
    """Results of a group of query heads of one row, and behind each head's, if PARTIAL, the logarithm of the
    sum of its exponentials, of which `top` is in units of log2.
    """
    member = tl.arange(0, result.shape[0])
    dim = tl.arange(0, result.shape[1])
    OUT_DIM: tl.constexpr = HEAD_DIM + 1 if PARTIAL else HEAD_DIM
    target = out + (head * GROUP + member) * OUT_DIM
    inside = elements(member < GROUP, dim, HEAD_DIM)
    tl.store(target[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
    if PARTIAL:
        seen = total > 0.0
        log2 = tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(target + HEAD_DIM, log2 / LOG2_E_CONST, mask=member < GROUP)


# Lengths of the batch must not make variants: a variant is compiled when first met, which takes seconds.
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    lens,
    sinks,
    out,
    partial_out,
    partial_stats,
    arrived,
    scale_log2,
    cap_log2,
    window,
    num_rows,
    q_row_stride,
    q_head_stride,
    table_stride,
    k_block_stride,
    k_row_stride,
    v_block_stride,
    v_row_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    PARTIAL: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One worker's piece of the line of tiles. A padding row counts one empty tile a head, so that its
    zeros get written.
    """
    worker = tl.program_id(0)
    rows = tl.arange(0, ROWS_PAD)
    all_lens = tl.load(lens + rows, mask=rows < num_rows, other=0)
    tiles = tl.cdiv(all_lens, BLOCK_N)
    if WINDOW:
        tiles -= tl.maximum(all_lens - window, 0) // BLOCK_N
    tiles = tl.where(rows < num_rows, tl.maximum(tiles, 1), 0)
    row_ends = tl.cumsum(tiles, axis=0) * KV_HEADS
    line = tl.sum(tiles, axis=0) * KV_HEADS
    piece = tl.cdiv(line, tl.num_programs(0))
    piece_start = worker * piece
    piece_end = tl.minimum(piece_start + piece, line)

    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_PAD)
    column = tl.arange(0, BLOCK_N)
    at = piece_start
    while at < piece_end:
        row = tl.sum((row_ends <= at).to(tl.int32), axis=0)
        row_tiles = tl.sum(tl.where(rows == row, tiles, 0), axis=0)
        row_start = tl.sum(tl.where(rows == row, row_ends, 0), axis=0) - row_tiles * KV_HEADS
        head = (at - row_start) // row_tiles
        head_start = row_start + head * row_tiles
        first = at - head_start
        count = tl.minimum(row_tiles - first, piece_end - at)

        context = tl.load(lens + row)
        oldest = 0
        if WINDOW:
            oldest = tl.maximum(context - window, 0)
        table = tables + row.to(tl.int64) * table_stride
        query_at = (
            q
            + row.to(tl.int64) * q_row_stride
            + (head * GROUP + member)[:, None] * q_head_stride
            + dim[None, :]
        )
        queries = elements(member < GROUP, dim, HEAD_DIM)
        query = tl.load(query_at, mask=queries, other=0.0)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        sum_out = tl.zeros([BLOCK_M, HEAD_PAD], tl.float32)
        tile_start = oldest // BLOCK_N + first
        tile_end = tl.where(context > 0, tile_start + count, tile_start)
        for tile in tl.range(tile_start, tile_end, num_stages=STAGES):
            start = tile * BLOCK_N
            block, offset = block_rows(table, start, context, BLOCK_TOKENS, BLOCK_N)
            visible = start + column < context
            if WINDOW:
                visible = visible & (start + column >= oldest)
            wanted = elements(visible, dim, HEAD_DIM)
            key_at = k_cache + block * k_block_stride + head * HEAD_DIM + offset * k_row_stride
            key = tl.load(key_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(query.dtype)
            value_at = v_cache + block * v_block_stride + head * HEAD_DIM + offset * v_row_stride
            value = tl.load(value_at[:, None] + dim[None, :], mask=wanted, other=0.0).to(query.dtype)
            scores = softcapped(dot(query, tl.trans(key), UPCAST), scale_log2, cap_log2, CAPPED)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            # Every tile has a visible key, so that the new maximum is finite.
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            shrink = tl.exp2(top - new_top)
            weight = tl.exp2(scores - new_top[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            sum_out = sum_out * shrink[:, None] + dot(weight.to(value.dtype), value, UPCAST)
            top = new_top

        OUT_DIM: tl.constexpr = HEAD_DIM + 1 if PARTIAL else HEAD_DIM
        row_out = out + row.to(tl.int64) * (KV_HEADS * GROUP * OUT_DIM)
        if count == row_tiles:
            if SINKS:
                sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32)
                sink = sink * LOG2_E_CONST
                new_top = tl.maximum(top, sink)
                shrink = tl.exp2(top - new_top)
                total = total * shrink + tl.exp2(sink - new_top)
                sum_out = sum_out * shrink[:, None]
                top = new_top
            result = sum_out / tl.where(total > 0.0, total, 1.0)[:, None]
            _store(row_out, result, top, total, head, GROUP, HEAD_DIM, PARTIAL)
        else:
            slot = worker * 2 + (at != piece_start).to(tl.int32)
            stats = partial_stats + slot * (2 * GROUP) + member
            tl.store(stats, top, mask=member < GROUP)
            tl.store(stats + GROUP, total, mask=member < GROUP)
            part_at = partial_out + (slot * GROUP + member)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(part_at, sum_out, mask=queries)
            # All threads' stores before the one thread's release; its acquire before all threads' loads.
            tl.debug_barrier()
            counter = arrived + row * KV_HEADS + head
            before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            first_worker = head_start // piece
            parts = (head_start + row_tiles - 1) // piece - first_worker + 1
            if before == parts - 1:
                tl.store(counter, 0)
                tl.debug_barrier()
                first_slot = (head_start != first_worker * piece).to(tl.int32)
                _combine(
                    partial_out,
                    partial_stats,
                    sinks,
                    row_out,
                    first_worker,
                    parts,
                    first_slot,
                    head,
                    GROUP,
                    GROUP_PAD,
                    HEAD_DIM,
                    HEAD_PAD,
                    PARTS,
                    SINKS,
                    PARTIAL,
                )
        at += count


def tile_config(head_dim: int, itemsize: int) -> tuple[int, int, int, int]:
    """(BLOCK_N, warps, stages, programs a multiprocessor).

    Enough bytes in flight for the memory of a Hopper (some 32 KiB a multiprocessor): 2 programs that each
    load one 16 to 32 KiB pair of tiles ahead.
    """
    if itemsize == 4:
        return max(16, min(64, 4096 // head_dim)), 4, 2, 1
    return (64 if head_dim <= 128 else 32), 4, 5, 2


@register(
    "paged_attention_decode",
    name="triton_fp8",
    platform=TRITON_FP8,
    dtypes=FLOATS,
    traits={"head_dim": HEAD_DIMS, "cache": {FP8}},
    priority=Priority.PORTABLE,
)
@register(
    "paged_attention_decode",
    name="triton",
    platform=TRITON,
    dtypes=FLOATS,
    traits={"head_dim": HEAD_DIMS, "cache": {SAME}},
    priority=Priority.PORTABLE,
)
def paged_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.paged_attention_decode`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    launch(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale,
        window,
        sinks,
        softcap,
        max_context_len,
        out,
        partial=False,
    )
    return out


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    softcap: float,
    max_context_len: int,
    out: Tensor,
    *,
    partial: bool,
) -> None:
    """Fills `out` `[R, Hq, D]`, or, `partial`, `[R, Hq, D + 1]` with the logarithms of the sums behind."""
    rows, heads, head_dim = q.shape
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    if rows == 0:
        return
    head_pad = max(16, next_power_of_two(head_dim))
    block_n, warps, stages, occupancy = tile_config(head_pad, q.element_size())
    longest = min(max_context_len, window + block_n) if window > 0 else max_context_len
    workers = min(units(q.device) * occupancy, rows * kv_heads * max(1, triton.cdiv(longest, block_n)))
    parts = torch.empty(workers * 2 * group * (head_dim + 2), dtype=torch.float32, device=q.device)
    stats = parts[workers * 2 * group * head_dim :]
    decode_kernel[(workers,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens.contiguous(),
        sinks,
        out,
        parts,
        stats,
        zeroed_counters(q.device, rows * kv_heads),
        scale * LOG2_E,
        softcap * LOG2_E,
        window,
        rows,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_PAD=next_power_of_two(group),
        BLOCK_M=max(16, next_power_of_two(group)),
        HEAD_DIM=head_dim,
        HEAD_PAD=head_pad,
        BLOCK_TOKENS=block_tokens,
        BLOCK_N=block_n,
        ROWS_PAD=rows_pad(rows),
        WINDOW=window > 0,
        SINKS=sinks is not None,
        CAPPED=softcap > 0.0,
        PARTIAL=partial,
        PARTS=COMBINE_PARTS,
        STAGES=stages,
        UPCAST=INTERPRETED,
        num_warps=warps,
    )
