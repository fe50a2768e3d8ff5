"""The batch as it lives on the device: slot-indexed tables that steps change by small deltas.

A request keeps one slot while it runs. Its tokens and block tables stay on the device; a step uploads which
slots take part, new block-table entries and the tokens of requests that were just admitted, and gathers the
rest there. The row behind the last slot belongs to nobody: padding rows of a fixed-size batch point to it,
and it is never written.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from quickturn_kernels import append_tokens, gather_decode

from quickturn.cache.layout import ArenaLayout
from quickturn.cache.views import LayerCache
from quickturn.execution.upload import upload
from quickturn.layers.forward import ForwardBatch

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class StepRows:
    """One step's rows on the host, decode rows first.

    slots, query_lens, context_lens: int32 [R]; `context_lens` counts the tokens that are in the cache
    before this step. samples: uint8 [R], 1 where the row's last token is to be sampled from.
    """

    slots: Ints
    query_lens: Ints
    context_lens: Ints
    samples: NDArray[np.uint8]
    num_decode: int


class DeviceBatch:
    """Token ids and block tables of every slot, on the device."""

    def __init__(
        self,
        layout: ArenaLayout,
        caches: tuple[LayerCache, ...],
        max_requests: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        """Allocate the tables: `max_requests` slots of up to `max_context` tokens."""
        self.max_requests = max_requests
        self.max_context = max_context
        self._block_tokens = layout.block_tokens
        self._caches = caches
        self._device = device
        self.padding_slot = max_requests
        rows = max_requests + 1
        blocks = -(-(max_context + 1) // layout.block_tokens)
        self.token_ids = torch.zeros((rows, max_context + 1), dtype=torch.int32, device=device)
        self.block_tables = tuple(
            torch.zeros((rows, blocks), dtype=torch.int32, device=device) for _ in layout.groups
        )
        for table in self.block_tables:
            table[self.padding_slot] = -1
        self._decode_starts = torch.arange(max_requests + 1, dtype=torch.int32, device=device)

    def load_tokens(self, slot: int, tokens: Ints) -> None:
        """Put all known tokens of an admitted request into its slot."""
        self.token_ids[slot, : len(tokens)] = self._upload(tokens)

    def update_tables(self, group: int, slots: Ints, indexes: Ints, blocks: Ints) -> None:
        """Enter new blocks: `block_tables[group][slots[i], indexes[i]] = blocks[i]`."""
        if len(slots):
            packed = self._upload(np.stack((slots, indexes, blocks)).astype(np.int64))
            self.block_tables[group].index_put_((packed[0], packed[1]), packed[2].to(torch.int32))

    def append(self, slots: Ints, positions: Ints, tokens: torch.Tensor) -> None:
        """Write sampled tokens (int64 [S]) to their slots on the device, behind the tokens at `positions`:
        the next step may run before the host saw them.
        """
        packed = self._upload(np.stack((slots, positions)).astype(np.int64))
        self.append_decoded(packed[0], packed[1], tokens)

    def append_decoded(self, slots: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> None:
        """`append` from tensors on the device alone (int64 [R]); nothing is written for padding rows."""
        append_tokens(self.token_ids, slots, positions, tokens)

    def forward_batch(self, rows: StepRows) -> ForwardBatch:
        """Gather what the model needs for one step."""
        count, num_decode = len(rows.slots), rows.num_decode
        slots = self._upload(rows.slots).long()
        if num_decode == count and rows.samples.all():
            longest = int(rows.context_lens.max(initial=0)) + 1
            return self.decode_batch(slots, self._upload(rows.context_lens).long(), longest)
        ends = np.cumsum(rows.query_lens, dtype=np.int32)
        starts = ends - rows.query_lens
        row_of_token = self._upload(np.repeat(np.arange(count), rows.query_lens))
        positions = self._upload(np.arange(ends[-1]) + np.repeat(rows.context_lens - starts, rows.query_lens))
        lengths = rows.context_lens + rows.query_lens
        max_context_len = int(lengths.max())
        size = self._block_tokens
        width = -(-max_context_len // size)
        token_slots = slots[row_of_token]
        index, offset = positions // size, positions % size
        return ForwardBatch(
            token_ids=self.token_ids[token_slots, positions].long(),
            positions=positions,
            num_decode=num_decode,
            query_start=self._upload(np.concatenate(([0], ends)).astype(np.int32)),
            context_lens=self._upload(lengths),
            block_tables=tuple(table[:, :width][slots] for table in self.block_tables),
            slot_mapping=tuple(
                table[token_slots, index].long() * size + offset for table in self.block_tables
            ),
            max_query_len=int(rows.query_lens.max()),
            max_context_len=max_context_len,
            sample_rows=self._upload((ends - 1)[rows.samples != 0].astype(np.int64)),
            caches=self._caches,
        )

    def decode_batch(
        self, slots: torch.Tensor, positions: torch.Tensor, max_context_len: int
    ) -> ForwardBatch:
        """A batch of decode rows, all sampled, from tensors on the device alone: a CUDA graph can record it.

        slots, positions: int64 [R]; a padding row has `padding_slot` and position -1.
        """
        count = len(slots)
        width = -(-max_context_len // self._block_tokens)
        rows = gather_decode(slots, positions, self.token_ids, self.block_tables, self._block_tokens, width)
        return ForwardBatch(
            token_ids=rows.token_ids,
            positions=rows.positions,
            num_decode=count,
            query_start=self._decode_starts[: count + 1],
            context_lens=rows.context_lens,
            block_tables=rows.block_tables,
            slot_mapping=rows.slot_mapping,
            max_query_len=1,
            max_context_len=max_context_len,
            sample_rows=None,
            caches=self._caches,
        )

    def _upload(self, array: NDArray[np.integer]) -> torch.Tensor:
        return upload(array, self._device)
