"""What one forward pass knows about its batch."""

from dataclasses import dataclass
from functools import cached_property

import torch

from quickturn.cache.views import LayerCache


@dataclass(frozen=True)
class Rows:
    """The rows of one kind (decode or prefill); `query_start` counts from their own first token."""

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of R rows; the first `num_decode` rows have one query token each, the others are prefill
    chunks.

    token_ids, positions: int64 [T]. query_start: int32 [R + 1], offsets into the tokens. context_lens: int32
    [R], keys visible to the row's last token (this step's tokens included; 0 marks a padding row).
    block_tables: per cache group int32 [R, max_blocks]. slot_mapping: per cache group int64 [T], `block_id *
    block_tokens + offset`, -1 for tokens that are padding. max_query_len, max_context_len: host bounds.
    sample_rows: int64 [S], token indexes whose logits are wanted, or None for all. caches: one for each
    decoder layer.
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
    caches: tuple[LayerCache, ...]

    @cached_property
    def decode(self) -> Rows | None:
        """The decode rows, None if there are none. Made once for all layers."""
        n = self.num_decode
        if n == 0:
            return None
        tables = tuple(table[:n] for table in self.block_tables)
        return Rows(self.query_start[: n + 1], self.context_lens[:n], tables)

    @cached_property
    def prefill(self) -> Rows | None:
        """The prefill rows, None if there are none. Made once for all layers."""
        n = self.num_decode
        if n == self.context_lens.shape[0]:
            return None
        if n == 0:
            return Rows(self.query_start, self.context_lens, self.block_tables)
        tables = tuple(table[n:] for table in self.block_tables)
        return Rows(self.query_start[n:] - n, self.context_lens[n:], tables)
