"""What one forward pass knows about its batch."""

from dataclasses import dataclass
from functools import cached_property

import torch

from quickturn.cache.views import AnyCache, LayerCache, LayerState


@dataclass(frozen=True)
class StateRows:
    """Which blocks of a state group each row reads and writes.

    reads, writes: int32 [R]; they may be the same block, and -1 in `writes` marks a padding row, for which
    nothing is read or written. zero: uint8 [R], 1 where nothing is read because the state starts at zero
    (`reads` is -1 there).
    """

    reads: torch.Tensor
    writes: torch.Tensor
    zero: torch.Tensor

    def __getitem__(self, rows: slice) -> "StateRows":
        """Those rows."""
        return StateRows(self.reads[rows], self.writes[rows], self.zero[rows])


@dataclass(frozen=True)
class Rows:
    """The rows of one kind (decode or prefill); `query_start` counts from their own first token."""

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    states: tuple[StateRows, ...]


@dataclass(frozen=True)
class OwnTokens:
    """A batch on a rank that holds a part of each block's tokens, of one cache group.

    slots: int64 [T], places in blocks of that part, negative for tokens that belong elsewhere or are padding.
    lines: int64 [T], 0 to T - 1, -1 for padding. context_lens: int32 [R], keys of each row that are here;
    max_context_len: a host bound on them.
    """

    slots: torch.Tensor
    lines: torch.Tensor
    context_lens: torch.Tensor
    max_context_len: int


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of R rows; the first `num_decode` rows have one query token each, the others are prefill
    chunks.

    token_ids, positions: int64 [T]. query_start: int32 [R + 1], offsets into the tokens. context_lens: int32
    [R], keys visible to the row's last token (this step's tokens included; 0 marks a padding row).
    block_tables: per full or window group int32 [R, max_blocks]. slot_mapping: the same, int64 [T],
    `block_id * block_tokens + offset`, -1 for tokens that are padding. max_query_len, max_context_len: host
    bounds. sample_rows: int64 [S], token indexes whose logits are wanted, or None for all. caches: one for
    each decoder layer. states: one for each state group. dp_tokens, dp_samples: T and S of every group of
    ranks that has requests of its own, in their order; empty where there is one group. dp_slices: of each
    slice of scored tokens how many rows every group has.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    num_decode: int
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    slot_mapping: tuple[torch.Tensor, ...]
    max_query_len: int
    max_context_len: int
    sample_rows: torch.Tensor | None
    caches: tuple[AnyCache, ...]
    states: tuple[StateRows, ...] = ()
    dp_tokens: tuple[int, ...] = ()
    dp_samples: tuple[int, ...] = ()
    dp_slices: tuple[tuple[int, ...], ...] = ()

    def keys_and_values(self, layer: int) -> LayerCache:
        """The cache of an attention layer."""
        cache = self.caches[layer]
        assert isinstance(cache, LayerCache)
        return cache

    def state(self, layer: int) -> LayerState:
        """The states of a recurrent layer."""
        cache = self.caches[layer]
        assert isinstance(cache, LayerState)
        return cache

    @cached_property
    def decode(self) -> Rows | None:
        """The decode rows, None if there are none. Made once for all layers."""
        n = self.num_decode
        if n == 0:
            return None
        tables = tuple(table[:n] for table in self.block_tables)
        states = tuple(rows[:n] for rows in self.states)
        return Rows(self.query_start[: n + 1], self.context_lens[:n], tables, states)

    @cached_property
    def prefill(self) -> Rows | None:
        """The prefill rows, None if there are none. Made once for all layers."""
        n = self.num_decode
        if n == self.context_lens.shape[0]:
            return None
        if n == 0:
            return Rows(self.query_start, self.context_lens, self.block_tables, self.states)
        tables = tuple(table[n:] for table in self.block_tables)
        states = tuple(rows[n:] for rows in self.states)
        return Rows(self.query_start[n:] - n, self.context_lens[n:], tables, states)

    def own_tokens(self, group: int, size: int, part: int, parts: int) -> OwnTokens:
        """The batch on a rank that holds tokens `part * size` to `(part + 1) * size` of each block of `size *
        parts`. Made once for all layers of the group.
        """
        made = self._own_tokens.get(group)
        if made is None:
            slots, whole = self.slot_mapping[group], size * parts
            offset = slots % whole
            here = torch.div(slots, whole, rounding_mode="floor") * size + offset % size
            belongs = (offset >= part * size) & (offset < (part + 1) * size)
            lens = self.context_lens
            rest = (lens % whole - part * size).clamp(0, size)
            made = self._own_tokens[group] = OwnTokens(
                torch.where(belongs, here, -1),
                torch.where(slots < 0, -1, torch.arange(slots.shape[0], device=slots.device)),
                torch.div(lens, whole, rounding_mode="floor") * size + rest,
                -(-self.max_context_len // whole) * size,
            )
        return made

    @cached_property
    def _own_tokens(self) -> dict[int, OwnTokens]:
        return {}
