"""A device that holds no numbers, only what they would mean: the oracle of the control plane.

Every cache position remembers the prefix that its key and value were computed from, every state the prefix
that it stands for. Running a plan checks that each row reads exactly the prefix of its own request, and
that nothing in use is overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import quickturn_control as qc
from numpy.typing import NDArray

Block = tuple[int, int, int]
"""(tier, group, block id)"""
GARBAGE = -1


@dataclass
class Track:
    """A request as its client and the device see it."""

    id: int
    salt: str
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stops: frozenset[int]
    host: list[int]
    """Tokens that the host has seen."""
    device: list[int] = field(default_factory=list)
    """Tokens that the device has: ahead of the host by what is in flight."""
    prefixes: list[int] = field(default_factory=list)
    """Identity of device[: i + 1]."""
    computed: int = 0
    slot: int = -1
    cached: int = -1
    found: int = -1
    """Tokens that were cached when it first got a slot."""

    def extend(self, tokens: Sequence[int]) -> None:
        """More device tokens."""
        for token in tokens:
            self.device.append(token)
            self.prefixes.append(hash((self.prefixes[-1] if self.prefixes else self.salt, token)))


@dataclass
class Flight:
    """A step that ran on the device and wasn't applied."""

    plan: qc.StepPlan
    tokens: list[int]
    counts: list[int]
    rows: list[int]
    """Request ids of the sampled rows."""
    touched: dict[Block, int]
    """Blocks that a row reads or writes, and the request."""


class Device:
    """Runs plans. `check` failures are AssertionErrors."""

    def __init__(
        self, groups: Sequence[tuple[str, int]], block_tokens: int, drafts: bool, random: Random
    ) -> None:
        self.groups = groups
        self.unit = block_tokens
        self.drafts = drafts
        self.random = random
        self.content: dict[Block, list[int]] = {}
        self.spoilt: dict[tuple[Block, int], frozenset[int]] = {}
        self.tables: list[dict[tuple[int, int], int]] = [{} for _ in groups]
        self.by_slot: dict[int, Track] = {}
        self.tracks: dict[int, Track] = {}
        self.flights: list[Flight] = []
        self.transfers: dict[int, tuple[Block, Block, list[int]]] = {}
        self.next_token = 100

    def run(self, plan: qc.StepPlan) -> None:
        """One plan: its changes, then its rows in order."""
        for slot in plan.released.slots:
            self.by_slot.pop(int(slot)).slot = -1
        for number, slot in zip(plan.ended.ids, plan.ended.slots, strict=True):
            if slot >= 0:
                self.by_slot.pop(int(slot))
            self.tracks.pop(int(number), None)
        for number, slot, cached, known in zip(
            plan.admitted.ids,
            plan.admitted.slots,
            plan.admitted.cached_tokens,
            plan.admitted.known_tokens,
            strict=True,
        ):
            track = self.tracks[int(number)]
            assert int(slot) not in self.by_slot, "a slot has two owners"
            assert known == len(track.host)
            assert cached < known
            assert cached % self.unit == 0
            self.by_slot[int(slot)] = track
            track.slot, track.computed, track.cached = int(slot), int(cached), int(cached)
            track.found = track.cached if track.found < 0 else track.found
            track.device, track.prefixes = [], []
            track.extend(track.host)
        for group, updates in enumerate(plan.block_updates):
            for slot, index, block in zip(updates.slots, updates.indexes, updates.blocks, strict=True):
                self.tables[group][int(slot), int(index)] = int(block)
        for transfers in (plan.transfers_before, plan.transfers_after):
            self._start(transfers)
        if plan.num_rows:
            self._run_rows(plan)

    def _start(self, transfers: qc.Transfers) -> None:
        columns = (
            transfers.groups,
            transfers.src_tiers,
            transfers.src_blocks,
            transfers.dst_tiers,
            transfers.dst_blocks,
        )
        for number, group, from_tier, source, to_tier, target in zip(transfers.ids, *columns, strict=True):
            src = (int(from_tier), int(group), int(source))
            dst = (int(to_tier), int(group), int(target))
            assert int(number) not in self.transfers
            assert not any(dst in (s, d) for s, d, _ in self.transfers.values()), (
                "a transfer's target is in use"
            )
            assert not any(src == d for _, d, _ in self.transfers.values()), (
                "a transfer reads what isn't there yet"
            )
            assert all(dst not in flight.touched for flight in self.flights), (
                "a transfer writes into a running step"
            )
            self.transfers[int(number)] = (src, dst, list(self.content[src]))
            self.content[dst] = [GARBAGE] * (1 if self.groups[group][0] == "state" else self.unit)
            for offset in range(self.unit):
                self.spoilt.pop((dst, offset), None)

    def finish_transfer(self, number: int) -> None:
        """The copy is complete; its source must be what it was."""
        src, dst, before = self.transfers.pop(number)
        assert self.content[src] == before, "the source of a transfer was overwritten"
        self.content[dst] = before

    def _run_rows(self, plan: qc.StepPlan) -> None:
        touched: dict[Block, int] = {}
        flight = Flight(plan, [], [], [], touched)
        written: dict[Block, int] = {}
        assert len(set(plan.slots.tolist())) == plan.num_rows, "two rows of one request"
        for row in range(plan.num_rows):
            track = self.by_slot[int(plan.slots[row])]
            query, sampled, decode = (
                int(plan.query_lens[row]),
                bool(plan.samples[row]),
                row < plan.num_decode_rows,
            )
            context = int(plan.context_lens[row])
            if decode and self.drafts:
                assert track.computed <= context
            else:
                assert track.computed == context, (track.computed, context)
            limit = len(track.prompt) + track.max_tokens
            assert context + query <= limit, "a row reaches beyond the longest answer"
            accepted = query
            if decode:
                assert sampled
                assert len(track.device) == track.computed + 1
                accepted = self.random.randint(1, query)
                track.extend([self._token(track) for _ in range(accepted - 1)])
            assert track.computed + accepted <= len(track.device)
            assert sampled == (decode or track.computed + query == len(track.device))
            self._row(plan, row, track, query, accepted, touched, written)
            track.computed += accepted
            if sampled:
                new = (
                    [*track.device[track.computed - accepted + 1 : track.computed], self._token(track)]
                    if decode
                    else [self._token(track)]
                )
                track.extend(new[-1:])
                flight.tokens += new
                flight.counts.append(len(new))
                flight.rows.append(track.id)
        for block, owner in written.items():
            assert all(other.touched.get(block, owner) == owner for other in self.flights), (
                f"{block} is in flight elsewhere"
            )
            assert all(block not in (src, dst) for src, dst, _ in self.transfers.values()), (
                f"{block} is being copied"
            )
        self.flights.append(flight)

    def _row(
        self,
        plan: qc.StepPlan,
        row: int,
        track: Track,
        query: int,
        accepted: int,
        touched: dict[Block, int],
        written: dict[Block, int],
    ) -> None:
        start, unit = track.computed, self.unit
        for group, (kind, window) in enumerate(self.groups):
            if kind == "state":
                source, target = int(plan.state_in[group][row]), int(plan.state_out[group][row])
                if plan.state_zero[group][row]:
                    assert start == 0
                    assert source == -1
                else:
                    seen = self._read((0, group, source), 0, track, touched)
                    assert start > 0
                    assert seen == track.prefixes[start - 1], "a row starts from a wrong state"
                self._write(
                    (0, group, target), 0, track.prefixes[start + accepted - 1], track, touched, written
                )
                continue
            first = max(0, start - window + 1) if kind == "window" else 0
            for position in range(first, start):
                block = (0, group, self.tables[group][track.slot, position // unit])
                assert self._read(block, position % unit, track, touched) == track.prefixes[position], (
                    f"wrong key at {position}"
                )
            for position in range(start, start + query):
                block = (0, group, self.tables[group][track.slot, position // unit])
                value = track.prefixes[position] if position < start + accepted else GARBAGE
                self._write(block, position % unit, value, track, touched, written)

    def spoil(self, blocks: list[list[int]]) -> None:
        """These blocks, by group, hold what a failed request computed: only who runs now may read it."""
        running = frozenset(track.id for track in self.by_slot.values())
        for group, ids in enumerate(blocks):
            for block in ids:
                for offset in range(len(self.content.get((0, group, block), ()))):
                    self.spoilt[(0, group, block), offset] = running

    def _read(self, block: Block, offset: int, track: Track, touched: dict[Block, int]) -> int:
        touched[block] = track.id
        allowed = self.spoilt.get((block, offset))
        assert allowed is None or track.id in allowed, "a failed request's block is used again"
        return self.content[block][offset]

    def _write(
        self,
        block: Block,
        offset: int,
        value: int,
        track: Track,
        touched: dict[Block, int],
        written: dict[Block, int],
    ) -> None:
        assert written.setdefault(block, track.id) == track.id, f"{block} has two owners"
        assert touched.get(block, track.id) == track.id, f"{block} is read by another row"
        touched[block] = track.id
        self.spoilt.pop((block, offset), None)
        size = 1 if self.groups[block[1]][0] == "state" else self.unit
        self.content.setdefault(block, [GARBAGE] * size)[offset] = value

    def _token(self, track: Track) -> int:
        # Few different tokens, so that stop tokens are hit and answers repeat each other.
        return (
            self.random.choice(sorted(track.stops))
            if track.stops and self.random.random() < 0.08
            else self.random.randint(0, 3)
        )

    def result(self) -> tuple[Flight, qc.StepResult]:
        """The oldest step that is out, as the runtime reports it."""
        flight = self.flights.pop(0)
        counts: NDArray[np.int32] = np.array(flight.counts, np.int32)
        tokens: NDArray[np.int32] = np.array(flight.tokens, np.int32)
        # Pieces of prompts beside decoding rows cost much, so that pauses are worth it.
        prompts = flight.plan.num_rows - flight.plan.num_decode_rows
        elapsed_us = 1000.0 + 10.0 * flight.plan.num_tokens + (1500.0 if prompts else 0.0)
        return flight, qc.StepResult(flight.plan.step, tokens, counts, elapsed_us)

    def applied(self, flight: Flight, applied: qc.Applied) -> None:
        """Check what the scheduler made of a step against what it should have made of it."""
        at = 0
        ended = dict(zip(applied.ids.tolist(), applied.reasons.tolist(), strict=True))
        slots = dict(zip(applied.ids.tolist(), applied.slots.tolist(), strict=True))
        assert len(applied.accepted) == len(flight.rows)
        for number, count, accepted in zip(
            flight.rows, flight.counts, applied.accepted.tolist(), strict=True
        ):
            tokens = flight.tokens[at : at + count]
            at += count
            track = self.tracks.get(number)
            if track is None:
                assert accepted == 0
                continue
            expected, reason = self._expected(track, tokens)
            assert accepted == expected, (accepted, expected)
            track.host += tokens[:expected]
            assert ended.pop(number, None) == reason
            if reason is not None:
                if slots[number] >= 0:
                    self.by_slot.pop(slots[number])
                self.tracks.pop(number)
        assert not ended

    @staticmethod
    def _expected(track: Track, tokens: Sequence[int]) -> tuple[int, int | None]:
        for i, token in enumerate(tokens):
            generated = len(track.host) - len(track.prompt) + i + 1
            if generated >= track.min_tokens and token in track.stops:
                return i + 1, qc.STOP
            if generated == track.max_tokens:
                return i + 1, qc.LENGTH
        return len(tokens), None
