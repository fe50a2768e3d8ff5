"""The batch as it lives on the device: slot-indexed tables that steps change by small deltas.

A request keeps one slot while it runs. Its tokens and block tables stay on the device; a step uploads which
slots take part, which states they read and write, new block-table entries and the tokens of requests that
were just admitted, and gathers the rest there. The row behind the last slot belongs to nobody: padding rows
of a fixed-size batch point to it, and it is never written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from quickturn_kernels import append_tokens, gather_decode

from quickturn.cache.layout import ArenaLayout
from quickturn.cache.views import AnyCache
from quickturn.execution.upload import upload, upload_together
from quickturn.layers.forward import ForwardBatch, StateRows

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class StateMoves:
    """The blocks of one state group that a step's rows read and write, int32 [R]; zero: uint8 [R], 1 where a
    state begins and nothing is read.
    """

    reads: Ints
    writes: Ints
    zero: NDArray[np.uint8]


@dataclass(frozen=True)
class StepRows:
    """One step's rows on the host, decode rows first.

    slots, query_lens, context_lens: int32 [R]; `context_lens` counts the tokens that are in the cache
    before this step. samples: uint8 [R], 1 where the row's last token is to be sampled from. states: one
    for each state group.
    """

    slots: Ints
    query_lens: Ints
    context_lens: Ints
    samples: NDArray[np.uint8]
    num_decode: int
    states: tuple[StateMoves, ...] = ()

    def decodes_only(self) -> bool:
        """Whether every row has one token and is sampled from."""
        return self.num_decode == len(self.slots) and bool(self.samples.all())


@dataclass(frozen=True)
class GroupCounts:
    """Tokens and sampled rows of every group of ranks that has requests of its own, in one step, all above
    0; tokens of prompts that are scored. `decode_rows`: the most of any group if none runs anything but
    decode rows, else 0.
    """

    tokens: tuple[int, ...]
    samples: tuple[int, ...]
    scored: tuple[int, ...] = ()
    decode_rows: int = 0


def decode_arrays(rows: StepRows, size: int, padding_slot: int) -> list[NDArray[np.integer]]:
    """All that a step of decode rows brings to the device, filled up to `size` rows: slots and positions
    (int64), then of each state group the blocks read and written (int32) and which states begin (uint8).

    Padding rows have `padding_slot`, position -1, and blocks -1: nothing is written for them.
    """

    def padded(array: NDArray[np.integer], dtype: type[np.integer], filler: int) -> NDArray[np.integer]:
        whole = np.full(size, filler, dtype=dtype)
        whole[: len(array)] = array
        return whole

    arrays = [padded(rows.slots, np.int64, padding_slot), padded(rows.context_lens, np.int64, -1)]
    for moves in rows.states:
        arrays += [padded(moves.reads, np.int32, -1), padded(moves.writes, np.int32, -1)]
        arrays.append(padded(moves.zero, np.uint8, 0))
    return arrays


def prompt_arrays(rows: StepRows, padding_slot: int) -> list[NDArray[np.integer]]:
    """All that a step of one prompt's tokens brings to the device: the slot, the position of the first token
    and the number of tokens (int64 [1]), then the states as in `decode_arrays`. Without a row: the padding
    slot and no tokens.
    """
    if len(rows.slots):
        numbers = (rows.slots, rows.context_lens, rows.query_lens)
        return [*(array.astype(np.int64) for array in numbers), *decode_arrays(rows, 1, padding_slot)[2:]]
    none = np.zeros(1, dtype=np.int64)
    return [none + padding_slot, none, none, *decode_arrays(rows, 1, padding_slot)[2:]]


def mixed_arrays(rows: StepRows, size: int, padding_slot: int) -> list[NDArray[np.integer]]:
    """All that a step of decode rows beside one row of a prompt, the last, brings to the device. Of the rows,
    decode rows filled up to `size`, then the prompt's: slots and first positions (int64 [size + 1]); the
    number of the prompt's tokens (int64 [1]). Of the rows that are sampled, one behind the other: the last
    token's index in the step, slot and position (int64 [size + 1]). Then the states as in `decode_arrays`.

    Padding is as there; the prompt's row is padding if there is no row. Padding that is sampled is token 0.
    """
    decodes = len(rows.slots) - 1

    def spread(array: NDArray[np.integer], dtype: type[np.integer], filler: int) -> NDArray[np.integer]:
        whole = np.full(size + 1, filler, dtype=dtype)
        if decodes >= 0:
            whole[:decodes] = array[:decodes]
            whole[size] = array[decodes]
        return whole

    positions, count = spread(rows.context_lens, np.int64, -1), np.zeros(1, dtype=np.int64)
    ends, sampled = np.arange(size + 1), np.flatnonzero(spread(rows.samples, np.uint8, 0))
    if decodes >= 0:
        count[0] = rows.query_lens[-1]
        ends[size] += count[0] - 1
    else:
        positions[size] = 0
    at, slots = np.zeros(size + 1, dtype=np.int64), spread(rows.slots, np.int64, padding_slot)
    sampled_slots, sampled_positions = np.full_like(at, padding_slot), np.full_like(at, -1)
    at[: len(sampled)] = ends[sampled]
    sampled_slots[: len(sampled)] = slots[sampled]
    sampled_positions[: len(sampled)] = (positions + (ends - np.arange(size + 1)))[sampled]
    arrays = [slots, positions, count, at, sampled_slots, sampled_positions]
    for moves in rows.states:
        arrays += [spread(moves.reads, np.int32, -1), spread(moves.writes, np.int32, -1)]
        arrays.append(spread(moves.zero, np.uint8, 0))
    return arrays


def state_rows(tensors: Sequence[torch.Tensor]) -> tuple[StateRows, ...]:
    """State groups from their tensors on the device, three each, in the order of `decode_arrays`."""
    return tuple(StateRows(*tensors[i : i + 3]) for i in range(0, len(tensors), 3))


class DeviceBatch:
    """Token ids and block tables of every slot, on the device."""

    def __init__(
        self,
        layout: ArenaLayout,
        caches: tuple[AnyCache, ...],
        max_requests: int,
        max_context: int,
        device: torch.device,
    ) -> None:
        """Allocate the tables: `max_requests` slots of up to `max_context` tokens."""
        self.max_requests = max_requests
        self.max_context = max_context
        self._block_tokens = layout.block_tokens
        self._caches = caches
        self._state_groups = sum(laid.group.kind == "state" for laid in layout.groups)
        self._device = device
        self.padding_slot = max_requests
        rows = max_requests + 1
        blocks = -(-(max_context + 1) // layout.block_tokens)
        self.token_ids = torch.zeros((rows, max_context + 1), dtype=torch.int32, device=device)
        self.block_tables = tuple(
            torch.zeros((rows, blocks), dtype=torch.int32, device=device)
            for laid in layout.groups
            if laid.group.kind != "state"
        )
        for table in self.block_tables:
            table[self.padding_slot] = -1
        self._decode_starts = torch.arange(max_requests + 1, dtype=torch.int32, device=device)

    def no_rows(self) -> StepRows:
        """A step of no rows, with as many state groups as there are."""
        none, flags = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint8)
        moves = StateMoves(none, none, flags)
        return StepRows(none, none, none, flags, 0, (moves,) * self._state_groups)

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

    def padding_batch(self) -> ForwardBatch:
        """A batch of one row that nothing is read for and nothing written."""
        inputs = upload_together(decode_arrays(self.no_rows(), 1, self.padding_slot), self._device)
        return self.decode_batch(inputs, 1)

    def forward_batch(self, rows: StepRows, samples: bool = False) -> ForwardBatch:
        """Gather what the model needs for one step. `samples`: logits of the last token are wanted where no
        row is sampled from.
        """
        count, num_decode = len(rows.slots), rows.num_decode
        if rows.decodes_only():
            longest = int(rows.context_lens.max(initial=0)) + 1
            inputs = upload_together(decode_arrays(rows, count, self.padding_slot), self._device)
            return self.decode_batch(inputs, longest)
        ends = np.cumsum(rows.query_lens, dtype=np.int32)
        starts = ends - rows.query_lens
        lengths = rows.context_lens + rows.query_lens
        wanted = rows.samples != 0
        if samples and not wanted.any():
            wanted[-1] = True
        slots, row_of_token, positions, query_start, context_lens, sampled, *moves = upload_together(
            [
                rows.slots.astype(np.int64),
                np.repeat(np.arange(count), rows.query_lens),
                np.arange(ends[-1]) + np.repeat(rows.context_lens - starts, rows.query_lens).astype(np.int64),
                np.concatenate(([0], ends)).astype(np.int32),
                lengths,
                (ends - 1)[wanted].astype(np.int64),
                *(array for state in rows.states for array in (state.reads, state.writes, state.zero)),
            ],
            self._device,
        )
        max_context_len = int(lengths.max())
        size = self._block_tokens
        width = -(-max_context_len // size)
        token_slots = slots[row_of_token]
        index, offset = positions // size, positions % size
        return ForwardBatch(
            token_ids=self.token_ids[token_slots, positions].long(),
            positions=positions,
            num_decode=num_decode,
            query_start=query_start,
            context_lens=context_lens,
            block_tables=tuple(table[:, :width][slots] for table in self.block_tables),
            slot_mapping=tuple(
                table[token_slots, index].long() * size + offset for table in self.block_tables
            ),
            max_query_len=int(rows.query_lens.max()),
            max_context_len=max_context_len,
            sample_rows=sampled,
            caches=self._caches,
            states=state_rows(moves),
        )

    def decode_batch(self, inputs: Sequence[torch.Tensor], max_context_len: int) -> ForwardBatch:
        """A batch of decode rows, all sampled, from tensors on the device alone: a CUDA graph can record it.

        inputs: what `decode_arrays` lists.
        """
        slots, positions, *moves = inputs
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
            states=state_rows(moves),
        )

    def prompt_batch(self, inputs: Sequence[torch.Tensor], size: int) -> ForwardBatch:
        """A batch of the next tokens of one prompt, at most `size`, its last one sampled, from tensors on the
        device alone: a CUDA graph can record it.

        inputs: what `prompt_arrays` lists. Tokens behind the last one are padding: no row has them, and
        nothing is written for them.
        """
        slot, start, count, *moves = inputs
        offsets = torch.arange(size, device=self._device)
        real = offsets < count
        positions = torch.where(real, start + offsets, 0)
        tables = tuple(table.index_select(0, slot) for table in self.block_tables)
        block, offset = positions // self._block_tokens, positions % self._block_tokens
        tokens = self.token_ids.index_select(0, slot)[0].index_select(0, positions)
        return ForwardBatch(
            token_ids=torch.where(real, tokens.long(), 0),
            positions=positions,
            num_decode=0,
            query_start=torch.cat((torch.zeros_like(count), count)).to(torch.int32),
            context_lens=(start + count).to(torch.int32),
            block_tables=tables,
            slot_mapping=tuple(
                torch.where(real, table[0].index_select(0, block).long() * self._block_tokens + offset, -1)
                for table in tables
            ),
            max_query_len=size,
            max_context_len=self.max_context,
            sample_rows=(count - 1).clamp_min(0),
            caches=self._caches,
            states=state_rows(moves),
        )

    def mixed_batch(self, inputs: Sequence[torch.Tensor], prompt_tokens: int) -> ForwardBatch:
        """A batch of decode rows and of the next tokens of one prompt, at most `prompt_tokens`, from tensors
        on the device alone: a CUDA graph can record it.

        inputs: what `mixed_arrays` lists.
        """
        slots, positions, count, sampled, _, _, *moves = inputs
        every = self.decode_batch((slots, positions), self.max_context)
        prompt = self.prompt_batch((slots[-1:], positions[-1:], count), prompt_tokens)
        n = every.num_decode - 1
        return replace(
            every,
            token_ids=torch.cat((every.token_ids[:n], prompt.token_ids)),
            positions=torch.cat((every.positions[:n], prompt.positions)),
            num_decode=n,
            query_start=torch.cat((every.query_start[: n + 1], prompt.query_start[1:] + n)),
            context_lens=torch.cat((every.context_lens[:n], prompt.context_lens)),
            slot_mapping=tuple(
                torch.cat((one[:n], chunk))
                for one, chunk in zip(every.slot_mapping, prompt.slot_mapping, strict=True)
            ),
            max_query_len=prompt_tokens,
            sample_rows=sampled,
            states=state_rows(moves),
        )

    def _upload(self, array: NDArray[np.integer]) -> torch.Tensor:
        return upload(array, self._device)
