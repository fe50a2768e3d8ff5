"""Random operations on one or two schedulers, beside the device oracle and a brute-force matcher."""

from collections import deque
from dataclasses import dataclass
from random import Random

import numpy as np
import quickturn_control as qc
from control_device import Device, Track
from numpy.typing import NDArray

BOUND = 2500
"""Operations within which every request ends, three times what was ever seen."""


@dataclass(frozen=True)
class Setup:
    """What one run is made of. `groups` are (kind, blocks per slab, window)."""

    groups: tuple[tuple[str, int, int], ...]
    num_slabs: int
    block_tokens: int = 4
    max_requests: int = 5
    max_step_tokens: int = 24
    draft_tokens: int = 0
    pipeline_depth: int = 2
    tiers: tuple[tuple[int, ...], ...] = ()
    prefix_cache: bool = True
    share_wait: float = 0.3
    stride: int = 16
    min_tps: float = 0.0
    max_pause: float = 0.0
    recorded: tuple[tuple[int, int], ...] = ()

    def config(self) -> qc.SchedulerConfig:
        """The scheduler's configuration."""
        return qc.SchedulerConfig(
            groups=[qc.GroupConfig(kind, per, window=window) for kind, per, window in self.groups],  # type: ignore[arg-type]
            num_slabs=self.num_slabs,
            block_tokens=self.block_tokens,
            max_requests=self.max_requests,
            max_step_tokens=self.max_step_tokens,
            draft_tokens=self.draft_tokens,
            pipeline_depth=self.pipeline_depth,
            tiers=[qc.TierConfig(f"tier{i}", list(blocks)) for i, blocks in enumerate(self.tiers)],
            prefix_cache=self.prefix_cache,
            recorded=list(self.recorded),
            policy=qc.Policy(
                share_wait=self.share_wait,
                checkpoint_stride=self.stride,
                min_tps_per_user=self.min_tps,
                max_pause=self.max_pause,
                pause_every=4,
                fairness=0.5,
                demote_below=0.6,
            ),
            kv_events=True,
        )


class Driver:
    """One run. Every method is one operation; all of them check."""

    def __init__(self, setup: Setup, random: Random, twin: bool = True) -> None:
        self.setup = setup
        self.random = random
        self.schedulers = [qc.Scheduler(setup.config()) for _ in range(2 if twin else 1)]
        self.device = Device(
            [(kind, window) for kind, _, window in setup.groups],
            setup.block_tokens,
            setup.draft_tokens > 0,
            random,
        )
        self.present: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self.now = 0.0
        self.last_id = 0
        self.refused = 0
        self.ended = 0
        self.cached = 0
        self.operations = 0
        self.recent: deque[Track] = deque(maxlen=24)
        self.born: dict[int, int] = {}

    @property
    def scheduler(self) -> qc.Scheduler:
        """The one whose plans are run."""
        return self.schedulers[0]

    def tokens(self) -> list[int]:
        """A prompt from a small world: few first tokens, continuations of recent requests."""
        if self.recent and self.random.random() < 0.5:
            source = self.random.choice(self.recent).host
            cut = self.random.choice([self.random.randint(1, len(source)), len(source)])
            return source[:cut] + [self.random.randint(0, 3) for _ in range(self.random.randint(0, 12))]
        length = self.random.choice([1, 3, 4, 5, 8, 16, 17, 33, 60])
        family = self.random.randint(0, 2)
        return [family + 10] * min(length, 13) + [
            self.random.randint(0, 1) for _ in range(max(0, length - 13))
        ]

    def add(self) -> None:
        """A new request, maybe one that can never fit."""
        self.ask(self.tokens(), self.random.choice(["", "", "tenant"]))

    def ask(self, prompt: list[int], salt: str = "") -> None:
        """A request with this prompt."""
        self.last_id += 1
        track = Track(
            self.last_id,
            salt,
            prompt,
            max_tokens=self.random.randint(1, 20),
            min_tokens=self.random.choice([0, 0, 3]),
            stops=frozenset(self.random.choice([(), (50,), (50, 51, 52, 53, 54, 55)])),
            host=list(prompt),
        )
        try:
            for scheduler in self.schedulers:
                scheduler.add(
                    qc.Request(
                        track.id,
                        np.array(prompt, np.int32),
                        max_tokens=track.max_tokens,
                        min_tokens=track.min_tokens,
                        stop_token_ids=sorted(track.stops),
                        arrival=self.now,
                        priority=self.random_for(track.id).choice([0, 0, 1]),
                        session=self.random_for(track.id).choice(["", "a", "b"]),
                        deadline=self.now + 3.0 if track.id % 11 == 0 else None,
                        cache_salt=salt,
                        boundaries=[7] if track.id % 5 == 0 else [],
                        retention=0.5 if track.id % 7 == 0 else 0.0,
                        fresh=track.id % 9 == 0,
                    )
                )
        except ValueError as refused:
            if "needs" not in str(refused):
                raise
            self.refused += 1
            return
        self.device.tracks[track.id] = track
        self.recent.append(track)
        self.born[track.id] = self.operations

    @staticmethod
    def random_for(number: int) -> Random:
        """The same choices for both schedulers."""
        return Random(number)

    def plan(self) -> bool:
        """One plan, run at once. True if it had rows."""
        self.now += 0.01
        plans = [scheduler.plan(self.now) for scheduler in self.schedulers]
        plan = plans[0]
        for other in plans[1:]:
            assert same_plan(plan, other), "two schedulers fed the same calls disagree"
        if plan is None:
            self.follow_events()  # it may have evicted for a row that found no room all the same
            return False
        self.device.run(plan)
        self.cached += int(plan.admitted.cached_tokens.sum())
        self.follow_events()
        return plan.num_rows > 0

    def apply(self) -> bool:
        """The oldest step's result, if one is out."""
        if not self.device.flights:
            return False
        flight, result = self.device.result()
        applied = [scheduler.apply(result) for scheduler in self.schedulers]
        for other in applied[1:]:
            assert applied[0].ids.tolist() == other.ids.tolist()
            assert applied[0].accepted.tolist() == other.accepted.tolist()
        self.device.applied(flight, applied[0])
        self.ended += len(applied[0].ids)
        self.follow_events()
        return True

    def stop_one(self) -> None:
        """Cancel or finish a request, or let it fail, or an unknown one."""
        way = self.random.choices(("cancel", "finish", "fail"), (5, 3, 2))[0]
        ids = sorted(self.device.tracks)
        number = self.random.choice(ids) if ids and self.random.random() < 0.95 else 10**9
        found = [getattr(scheduler, way)(number) for scheduler in self.schedulers]
        assert all(one == found[0] for one in found)
        assert (found[0] not in (None, False)) == (number in self.device.tracks)
        self.follow_events()
        if number in self.device.tracks:
            # Its slot is reported as free by the next plan.
            track = self.device.tracks.pop(number)
            self.ended += 1
            if way == "fail":
                self.device.spoil(found[0])
            if way == "fail" and track.found >= 0:
                # Of its tokens only what it found cached itself can be found again.
                tokens = np.array([*track.host, 0], np.int32)
                assert self.scheduler.match(tokens, cache_salt=track.salt) <= track.found

    def hold(self) -> None:
        """A tool call of some session."""
        name = self.random.choice(["a", "b", "c"])
        assert len({scheduler.hold(name, 0.3) for scheduler in self.schedulers}) == 1

    def transfers(self) -> None:
        """Some of the copies complete, in any order."""
        ids = sorted(self.device.transfers)
        self.random.shuffle(ids)
        self.complete(ids[: self.random.randint(0, len(ids))])

    def complete(self, done: list[int]) -> None:
        """These copies have arrived."""
        for number in done:
            self.device.finish_transfer(number)
        for scheduler in self.schedulers:
            scheduler.transfers_done(np.array(done, np.int64))
        self.follow_events()

    def reset(self) -> None:
        """Forget all cached blocks."""
        assert len({scheduler.reset_prefix_cache() for scheduler in self.schedulers}) == 1
        self.follow_events()

    def follow_events(self) -> None:
        """Keep the picture that a router would have."""
        for scheduler in self.schedulers[1:]:
            scheduler.take_events()
        events = self.scheduler.take_events()
        for kind, tier, group, key in zip(
            events.kinds, events.tiers, events.groups, events.hashes.tolist(), strict=True
        ):
            known = self.present.setdefault((int(tier), int(group)), set())
            if kind == 1:
                assert tuple(key) not in known
                known.add(tuple(key))
            else:
                known.remove(tuple(key))

    def match(self) -> None:
        """The joint match of a random prompt against a brute-force matcher."""
        prompt, salt = self.tokens(), self.random.choice(["", "tenant"])
        tokens = np.array(prompt, np.int32)
        assert self.scheduler.match(tokens, cache_salt=salt) == self.brute_force(tokens, salt)

    def brute_force(self, tokens: NDArray[np.int32], salt: str) -> int:
        """The longest boundary from which every group can go on, tried one by one from the end."""
        unit = self.setup.block_tokens
        if not self.setup.prefix_cache:
            return 0
        hashes = [tuple(pair) for pair in self.scheduler.prefix_hashes(tokens, cache_salt=salt).tolist()]

        def has(group: int, block: int) -> bool:
            return any(
                hashes[block] in self.present.get((tier, group), ())
                for tier in range(1 + len(self.setup.tiers))
            )

        for boundary in range((len(tokens) - 1) // unit, 0, -1):
            good = True
            for group, (kind, _, window) in enumerate(self.setup.groups):
                if kind == "state":
                    good = good and has(group, boundary - 1)
                else:
                    first = max(0, boundary * unit - window + 1) // unit if kind == "window" else 0
                    good = good and all(has(group, block) for block in range(first, boundary))
            if good:
                return boundary * unit
        return 0

    def check(self) -> None:
        """The scheduler's own audit, and the sums that its figures must give."""
        self.scheduler.check()
        stats = self.scheduler.stats()
        slabs = sum(
            value for name, value in stats.items() if name.startswith("group_") and name.endswith("_slabs")
        )
        assert slabs + stats["slabs_free"] == stats["slabs_total"], stats
        evictable = sum(value for name, value in stats.items() if name.endswith("_blocks_evictable"))
        assert evictable == stats["blocks_evictable"], stats

    def drain(self) -> None:
        """Nothing new: everything that is left must end, and nothing may be left behind."""
        idle = 0
        for _ in range(5000):
            if not self.device.tracks and not self.device.flights and not self.device.transfers:
                break
            progress = self.plan()
            progress = self.apply() or progress or bool(self.device.transfers)
            self.complete(sorted(self.device.transfers))
            idle = 0 if progress else idle + 1
            assert idle < 200, f"nothing moves: {sorted(self.device.tracks)} {self.scheduler.stats()}"
        assert not self.device.tracks, "requests starve"
        self.plan()
        while self.device.transfers:
            self.complete(sorted(self.device.transfers))
            self.plan()
        self.check()
        self.reset()
        stats = self.scheduler.stats()
        assert stats["slabs_free"] == self.setup.num_slabs, f"blocks leak: {stats}"
        assert stats["index_nodes"] == 0
        assert all(not known for known in self.present.values()), "events leave blocks behind"

    def any_operation(self) -> None:
        """One operation, in the proportions of a busy server. Nobody waits for more than `BOUND` of them."""
        self.operations += 1
        if self.operations % 50 == 0:
            oldest = min(self.device.tracks, default=None)
            assert oldest is None or self.operations - self.born[oldest] < BOUND, f"request {oldest} starves"
        draw = self.random.random()
        if draw < 0.10:
            if len(self.device.tracks) < 14:
                self.add()
        elif draw < 0.13:
            self.stop_one()
        elif draw < 0.53:
            self.plan()
        elif draw < 0.86:
            self.apply()
        elif draw < 0.93:
            self.transfers()
        elif draw < 0.96:
            self.match()
        elif draw < 0.975:
            self.check()
        elif draw < 0.995:
            self.hold()
        elif draw < 0.996:
            self.reset()


def same_plan(a: qc.StepPlan | None, b: qc.StepPlan | None) -> bool:
    """Equal in every array."""
    if a is None or b is None:
        return a is b
    return flat(a) == flat(b)


def flat(plan: qc.StepPlan) -> list[object]:
    """A plan as plain lists."""
    parts: list[object] = [plan.step, plan.num_decode_rows, plan.num_tokens]
    parts += [column.tolist() for column in (plan.slots, plan.query_lens, plan.context_lens, plan.samples)]
    for updates in plan.block_updates:
        parts.append((updates.slots.tolist(), updates.indexes.tolist(), updates.blocks.tolist()))
    for columns in (plan.state_in, plan.state_out, plan.state_zero):
        parts.append([column.tolist() for column in columns])
    parts += [plan.admitted.ids.tolist(), plan.released.ids.tolist(), plan.ended.ids.tolist()]
    for transfers in (plan.transfers_before, plan.transfers_after):
        parts.append((transfers.ids.tolist(), transfers.src_blocks.tolist(), transfers.dst_blocks.tolist()))
    return parts
