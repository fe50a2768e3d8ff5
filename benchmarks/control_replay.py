"""Replay recorded agent sessions through the control plane alone, on a simulated clock and device.

    python benchmarks/control_replay.py TRACES --json benchmarks/results/control_replay.json

All sessions start at once; each request is sent when the one before it was answered and the recorded think
time has passed. The cache has the shape of a large hybrid: 20 KiB of keys and values a token, and a
recurrent state of 63 MiB. What is printed is cached / ceiling: prompt tokens from the cache over those that
an infinite cache would have had.

The working set is, summed over the sessions, the slabs of the largest context and five states: the one
being written, and the checkpoints of a turn (end of system prompt and tools, before the end of the prompt,
there, end of the answer).
"""

import argparse
import heapq
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import quickturn_control as qc
from numpy.typing import NDArray

UNIT = 64
BLOCKS_PER_SLAB = 50
"""63 MiB / (64 tokens x 20 KiB)."""
BLOCK_BYTES = 64 * 20 * 1024
STATE_BYTES = 63 << 20
BUS = 25e9
"""Bytes a second between device and host, each way."""


@dataclass(frozen=True)
class Turn:
    """One recorded request: prompt and answer length, block ids, think time before it, how it ended."""

    tokens: int
    answer: int
    ids: tuple[int, ...]
    think: float
    stop: str


@dataclass
class Session:
    """A trace being replayed."""

    name: str
    turns: list[Turn]
    tools_end: int = 0
    """Tokens of system prompt and tool descriptions: a boundary that a runtime knows."""
    at: int = 0
    seen: set[int] = field(default_factory=set)
    prompt: int = 0
    cached: int = 0
    ceiling: int = 0

    def slabs(self) -> int:
        """What the session needs of the cache at its largest."""
        most = max(turn.tokens + turn.answer for turn in self.turns)
        return -(-most // (UNIT * BLOCKS_PER_SLAB)) + 5

    def next_prompt(self) -> NDArray[np.int32]:
        """Tokens of the turn that is due, and its ceiling into the books."""
        turn = self.turns[self.at]
        number = int(self.name.split("_")[1])
        parts = [
            np.random.default_rng((number, block)).integers(0, 1 << 17, UNIT, dtype=np.int32)
            for block in turn.ids
        ]
        rest = max(0, turn.tokens - UNIT * len(turn.ids))
        parts.append(
            np.random.default_rng((number, 1 << 30, self.at)).integers(0, 1 << 17, rest, dtype=np.int32)
        )
        known = 0
        while known < len(turn.ids) and turn.ids[known] in self.seen:
            known += 1
        self.seen.update(turn.ids)
        self.prompt += turn.tokens
        self.ceiling += min(known * UNIT, turn.tokens - 1)
        return np.concatenate(parts)[: turn.tokens]


def load(folder: Path, names: Sequence[str] = ()) -> list[Session]:
    """The traces of a folder, in order of their names."""
    sessions = []
    for path in sorted(folder.glob("trace_*.json")):
        if names and path.stem not in names:
            continue
        trace = json.loads(path.read_text())
        turns = [Turn(*entry) for entry in flatten(trace["requests"])]
        sessions.append(Session(path.stem, turns, trace["system_tokens"] + trace["tool_tokens"]))
    return sessions


def flatten(requests: list[dict[str, object]]) -> Iterator[tuple[int, int, tuple[int, ...], float, str]]:
    """Requests in order; those of a subagent stand in for it."""
    for request in requests:
        if request["type"] == "subagent":
            yield from flatten(request["requests"])  # type: ignore[arg-type]
        else:
            ids: list[int] = request["hash_ids"]  # type: ignore[assignment]
            out = max(1, int(request["out"]))  # type: ignore[call-overload]
            yield (
                int(request["in"]),
                out,
                tuple(ids),
                float(request["think_time"] or 0.0),
                str(request.get("stop")),
            )  # type: ignore[call-overload,arg-type]


def step_seconds(plan: qc.StepPlan) -> float:
    """A device like one H200 with a 30B mixture: weights or arithmetic bind; attention reads the cache."""
    context = float(plan.context_lens.sum()) if plan.num_rows else 0.0
    return max(0.004, plan.num_tokens / 25000.0) + context * 20 * 1024 / 4e12


class Replay:
    """All sessions on one scheduler."""

    def __init__(self, sessions: list[Session], slabs: int, host_share: float, hold: float = 120.0) -> None:
        full, state = int(host_share * slabs * BLOCKS_PER_SLAB * 0.6), int(host_share * slabs * 0.4)
        tiers = [qc.TierConfig("host", [full, state])] if host_share > 0 else []
        self.scheduler = qc.Scheduler(
            qc.SchedulerConfig(
                groups=[qc.GroupConfig("full", BLOCKS_PER_SLAB), qc.GroupConfig("state", 1)],
                num_slabs=slabs,
                max_requests=64,
                max_step_tokens=8192,
                tiers=tiers,
            )
        )
        self.sessions = sessions
        self.hold = hold
        self.now = 0.0
        self.due = [(session.turns[0].think, i) for i, session in enumerate(sessions)]
        heapq.heapify(self.due)
        self.owner: dict[int, tuple[Session, Turn]] = {}
        self.arrivals: list[tuple[float, int]] = []
        self.bus_free = {True: 0.0, False: 0.0}
        self.flights: list[tuple[qc.StepPlan, float]] = []
        self.counted: set[int] = set()
        self.last_id = 0
        self.first_token: list[float] = []

    def run(self) -> None:
        """To the end of all sessions."""
        while self.due or self.scheduler.has_unfinished():
            while self.due and self.due[0][0] <= self.now:
                self.send(heapq.heappop(self.due)[1])
            done = [number for at, number in self.arrivals if at <= self.now]
            if done:
                self.arrivals = [(at, number) for at, number in self.arrivals if at > self.now]
                self.scheduler.transfers_done(done)
            plan = self.scheduler.plan(self.now)
            if plan is not None:
                self.note(plan)
            if self.flights:
                self.settle()
            elif plan is None:
                # Nothing can run: on to whatever happens next.
                self.now = min(
                    [at for at, _ in self.due[:1]] + [at for at, _ in self.arrivals], default=self.now + 1.0
                )

    def send(self, index: int) -> None:
        """The next request of a session."""
        session = self.sessions[index]
        turn = session.turns[session.at]
        self.last_id += 1
        self.owner[self.last_id] = (session, turn)
        self.scheduler.add(
            qc.Request(
                self.last_id,
                session.next_prompt(),
                max_tokens=turn.answer,
                arrival=self.now,
                session=session.name,
                boundaries=[session.tools_end],
            )
        )

    def note(self, plan: qc.StepPlan) -> None:
        """What a plan says: reuse, transfers, a step that starts."""
        for number, cached in zip(
            plan.admitted.ids.tolist(), plan.admitted.cached_tokens.tolist(), strict=True
        ):
            if number not in self.counted:
                self.counted.add(number)
                self.owner[number][0].cached += cached
        for up, transfers in ((True, plan.transfers_before), (False, plan.transfers_after)):
            for number, group in zip(transfers.ids.tolist(), transfers.groups.tolist(), strict=True):
                self.bus_free[up] = (
                    max(self.bus_free[up], self.now) + (STATE_BYTES if group else BLOCK_BYTES) / BUS
                )
                self.arrivals.append((self.bus_free[up], number))
        if plan.num_rows:
            self.flights.append((plan, step_seconds(plan)))

    def settle(self) -> None:
        """The step that is out has run."""
        plan, seconds = self.flights.pop(0)
        self.now += seconds
        tokens = np.full(plan.num_samples, 7, np.int32)
        for number in self.scheduler.apply(
            qc.StepResult(plan.step, tokens, elapsed_us=seconds * 1e6)
        ).ids.tolist():
            session, turn = self.owner.pop(number)
            if turn.stop == "tool_use":
                self.scheduler.hold(session.name, self.hold)
            session.at += 1
            if session.at < len(session.turns):
                heapq.heappush(
                    self.due, (self.now + session.turns[session.at].think, self.sessions.index(session))
                )


def measure(folder: Path, share: float, host_share: float, names: Sequence[str] = ()) -> dict[str, object]:
    """One replay with a pool of `share` of the working set, and a host tier of `host_share` of the pool."""
    sessions = load(folder, names)
    working_set = sum(session.slabs() for session in sessions)
    replay = Replay(sessions, max(1, int(share * working_set)), host_share)
    replay.run()
    stats = replay.scheduler.stats()
    ratios = {session.name: round(session.cached / max(1, session.ceiling), 4) for session in sessions}
    return {
        "pool_share": share,
        "slabs": max(1, int(share * working_set)),
        "host_share": host_share,
        "cached_over_ceiling": ratios,
        "least": min(ratios.values()),
        "all": round(sum(s.cached for s in sessions) / sum(s.ceiling for s in sessions), 4),
        "prompt_tokens": sum(s.prompt for s in sessions),
        **{key: int(stats[key]) for key in ("steps", "evictions", "retractions", "loads", "demotes")},
    }


def main() -> None:
    """Print the table; write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, help="folder with trace_*.json")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    runs = [
        measure(options.traces, share, host)
        for share, host in ((1.0, 0.0), (0.6, 2.0), (0.6, 0.0), (0.3, 2.0), (0.3, 0.0))
    ]
    print(f"{'trace':<12}" + "".join(f"{run['pool_share']:>7.0%}+{run['host_share']:.0f}" for run in runs))
    names = list(runs[0]["cached_over_ceiling"])  # type: ignore[call-overload]
    for name in names:
        print(f"{name:<12}" + "".join(f"{run['cached_over_ceiling'][name]:>9.4f}" for run in runs))  # type: ignore[index]
    for key in ("least", "all", "slabs", "steps", "evictions", "retractions", "loads", "demotes"):
        print(f"{key:<12}" + "".join(f"{run[key]:>9}" for run in runs))
    if options.json:
        result = {"command": "python " + " ".join(sys.argv), "build": qc.build_info(), "runs": runs}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
