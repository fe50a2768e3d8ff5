"""Watches every state that an engine reads and writes, and ruins what nobody may read again."""

from collections.abc import Sequence
from typing import Any

import torch
from driving import Driver

from quickturn.cache.views import AnyCache, LayerState
from quickturn.execution.batch import StepRows
from quickturn.execution.runner import BlockUpdate, PendingStep

GARBAGE = 1e5
"""What unwritten keys and values hold: attention gives them no weight, but a NaN is one times zero, too."""


class StateWatch:
    """Sits between the loop and the runner of a driver's engine.

    Of every state block it remembers which tokens it is the state of, and asserts that what a row reads is
    the state of exactly the tokens before it. A block that is written without having been read is filled
    with NaN first, and blocks of keys and values that are new to a row with garbage: what was there before
    is nobody's.
    """

    def __init__(self, driver: Driver) -> None:
        self._core = driver.core
        self._runner = driver.core._runner
        self._launch = self._runner.launch
        self.caches: tuple[AnyCache, ...] = self._runner.arena.layer_caches()
        self.holds: dict[tuple[int, int], tuple[int, ...]] = {}
        self.moved, self.stayed, self.began, self.resumed = 0, 0, 0, 0
        self._runner.launch = self.launch  # type: ignore[method-assign]
        self._slots: dict[int, tuple[int, ...]] = {}

    def launch(self, rows: StepRows, updates: Sequence[BlockUpdate], *rest: Any) -> PendingStep:
        """Check, ruin, and go on."""
        known = self._tokens(rows)
        for group, moves in enumerate(rows.states):
            written = moves.writes.tolist()
            assert len(set(written)) == len(written), "two rows write one block"
            read = set(moves.reads.tolist()) - {-1}
            for row, (reads, writes, zero) in enumerate(
                zip(moves.reads.tolist(), written, moves.zero.tolist(), strict=True)
            ):
                before = int(rows.context_lens[row])
                if zero:
                    assert (reads, before) == (-1, 0)
                    self.began += 1
                else:
                    assert self.holds[group, reads] == known[row][:before], f"row {row} reads {reads}"
                assert writes == reads or writes not in read, (
                    f"row {row} writes {writes}, which another reads"
                )
                self.moved += writes != reads
                self.stayed += writes == reads
                if writes != reads:
                    self._ruin(group, writes)
                self.holds[group, writes] = known[row][: before + int(rows.query_lens[row])]
        for group, update in enumerate(updates):
            self._ruin_new_blocks(group, update, rows)
        return self._launch(rows, updates, *rest)

    def ruin_everything(self) -> None:
        """NaN in every state; for a time when nothing is cached."""
        self.holds.clear()
        for cache in self.caches:
            if isinstance(cache, LayerState):
                cache.recurrent.fill_(torch.nan)
                cache.conv.fill_(torch.nan)

    def _tokens(self, rows: StepRows) -> list[tuple[int, ...]]:
        """What each row's slot holds on the device, up to the end of this step."""
        table: Any = self._runner._batch.token_ids
        ends = (rows.context_lens + rows.query_lens).tolist()
        return [
            tuple(table[slot, :end].tolist()) for slot, end in zip(rows.slots.tolist(), ends, strict=True)
        ]

    def _ruin(self, group: int, block: int) -> None:
        for cache in self.caches:
            if isinstance(cache, LayerState) and cache.group == group:
                cache.recurrent[block] = torch.nan
                cache.conv[block] = torch.nan

    def _ruin_new_blocks(self, group: int, update: BlockUpdate, rows: StepRows) -> None:
        size = self._runner.arena.layout.block_tokens
        context = dict(zip(rows.slots.tolist(), rows.context_lens.tolist(), strict=True))
        for slot, index, block in zip(
            update.slots.tolist(), update.indexes.tolist(), update.blocks.tolist(), strict=True
        ):
            if index * size < context.get(slot, 1 << 30):
                continue
            for cache in self.caches:
                if not isinstance(cache, LayerState) and cache.group == group:
                    cache.k[block] = GARBAGE
                    cache.v[block] = GARBAGE
