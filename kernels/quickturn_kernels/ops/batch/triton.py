"""Gathering and appending in Triton: one small kernel a step and cache group in place of a dozen."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.batch import DecodeInputs
from quickturn_kernels.platform import TRITON
from quickturn_kernels.registry import Priority, register

CHUNK = 1024


@triton.jit(do_not_specialize=["width", "ids_stride", "table_stride"])
def gather_decode_kernel(
    slots,
    positions,
    ids,
    table,
    out_ids,
    out_positions,
    out_lens,
    out_table,
    out_mapping,
    ids_stride,
    table_stride,
    width,
    BLOCK_TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """One row and chunk of its block table; the first group's programs also do what groups share."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    blocks = tl.load(table + slot * table_stride + entry, mask=entry < width, other=0)
    tl.store(out_table + row.to(tl.int64) * width + entry, blocks, mask=entry < width)
    if tl.program_id(1) == 0:
        real = position >= 0
        at = tl.maximum(position, 0)
        block = tl.load(table + slot * table_stride + at // BLOCK_TOKENS).to(tl.int64)
        tl.store(out_mapping + row, tl.where(real, block * BLOCK_TOKENS + at % BLOCK_TOKENS, -1))
        if FIRST:
            token = tl.load(ids + slot * ids_stride + at).to(tl.int64)
            tl.store(out_ids + row, tl.where(real, tl.maximum(token, 0), 0))
            tl.store(out_positions + row, at)
            tl.store(out_lens + row, tl.where(real, position + 1, 0).to(tl.int32))


@triton.jit(do_not_specialize=["ids_stride"])
def append_tokens_kernel(ids, slots, positions, tokens, ids_stride):
    """One row."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    if position >= 0:
        token = tl.load(tokens + row).to(tl.int32)
        tl.store(ids + tl.load(slots + row) * ids_stride + position + 1, token)


@register("gather_decode", name="triton", platform=TRITON, dtypes=(torch.int32,), priority=Priority.PORTABLE)
def gather_decode(
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    block_tokens: int,
    width: int,
) -> DecodeInputs:
    """See `quickturn_kernels.gather_decode`."""
    rows, device = slots.shape[0], slots.device
    ids, at = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    lens = torch.empty(rows, dtype=torch.int32, device=device)
    tables = tuple(torch.empty((rows, width), dtype=torch.int32, device=device) for _ in block_tables)
    mapping = tuple(torch.empty(rows, dtype=torch.int64, device=device) for _ in block_tables)
    for group, table in enumerate(block_tables if rows else ()):
        gather_decode_kernel[(rows, max(1, triton.cdiv(width, CHUNK)))](
            slots.contiguous(),
            positions.contiguous(),
            token_ids,
            table,
            ids,
            at,
            lens,
            tables[group],
            mapping[group],
            token_ids.stride(0),
            table.stride(0),
            width,
            BLOCK_TOKENS=block_tokens,
            FIRST=group == 0,
            ENTRIES=CHUNK,
        )
    return DecodeInputs(ids, at, lens, tables, mapping)


@register("append_tokens", name="triton", platform=TRITON, dtypes=(torch.int32,), priority=Priority.PORTABLE)
def append_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `quickturn_kernels.append_tokens`."""
    rows = slots.shape[0]
    if rows:
        append_tokens_kernel[(rows,)](
            token_ids,
            slots.contiguous(),
            positions.contiguous(),
            tokens.contiguous(),
            token_ids.stride(0),
            num_warps=1,
        )
