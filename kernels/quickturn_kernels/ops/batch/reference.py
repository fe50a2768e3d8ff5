"""Gathering and appending in plain PyTorch."""

import torch
from torch import Tensor

from quickturn_kernels.ops.batch import DecodeInputs
from quickturn_kernels.registry import Priority, register


@register("gather_decode", name="reference", priority=Priority.REFERENCE)
def gather_decode(
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    block_tokens: int,
    width: int,
) -> DecodeInputs:
    """See `quickturn_kernels.gather_decode`."""
    real = positions >= 0
    clamped = positions.clamp(min=0)
    block, offset = clamped // block_tokens, clamped % block_tokens
    return DecodeInputs(
        torch.where(real, token_ids[slots, clamped].long().clamp(min=0), 0),
        clamped,
        (positions + 1).clamp(min=0).to(torch.int32),
        tuple(table[:, :width][slots] for table in block_tables),
        tuple(
            torch.where(real, table[slots, block].long() * block_tokens + offset, -1)
            for table in block_tables
        ),
    )


@register("append_tokens", name="reference", priority=Priority.REFERENCE)
def append_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """See `quickturn_kernels.append_tokens`."""
    real = positions >= 0
    token_ids[slots[real], positions[real] + 1] = tokens[real].to(token_ids.dtype)
