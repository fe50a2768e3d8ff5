"""The slot-indexed state of a batch on the device: gathered for a decode step, and appended to."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quickturn_kernels.registry import Op, define


@dataclass(frozen=True)
class DecodeInputs:
    """Of R rows: token_ids, positions int64 [R] (0 for padding rows); context_lens int32 [R], this step's
    token included (padding: 0); by cache group block_tables int32 [R, width] and slot_mapping int64 [R]
    (padding: -1).
    """

    token_ids: Tensor
    positions: Tensor
    context_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mapping: tuple[Tensor, ...]


_GATHER: Op[Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...], int, int], DecodeInputs]] = define(
    "gather_decode"
)
_APPEND: Op[Callable[[Tensor, Tensor, Tensor, Tensor], None]] = define("append_tokens")


def gather_decode(
    slots: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    block_tokens: int,
    width: int,
) -> DecodeInputs:
    """What a step reads of the rows `slots` (int64 [R]) at `positions` (int64 [R], negative: padding).

    token_ids: int32 [S, C] by slot. block_tables: one int32 [S, B] a cache group; the first `width` entries
    of a row are gathered, of padding rows any. Negative token ids are read as 0.
    """
    function = _GATHER.table.get((slots.device, token_ids.dtype))
    if function is None:
        function = _GATHER.bind(slots.device, token_ids.dtype)
    return function(slots, positions, token_ids, block_tables, block_tokens, width)


def append_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """`token_ids[slots[r], positions[r] + 1] = tokens[r]` where positions[r] >= 0.

    token_ids: int32 [S, C]; the others: int64 [R].
    """
    function = _APPEND.table.get((slots.device, token_ids.dtype))
    if function is None:
        function = _APPEND.bind(slots.device, token_ids.dtype)
    function(token_ids, slots, positions, tokens)
