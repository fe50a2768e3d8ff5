"""The first of several ranks: the only one that talks to clients. It puts what they say in order, and gives
every rank the word for each step.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from quickturn.config import EngineConfig
from quickturn.engine.constraints import Waiting
from quickturn.engine.core import EngineCore
from quickturn.engine.crew import Crew, spawn
from quickturn.engine.link import LinkClosed
from quickturn.engine.live import LastStep
from quickturn.engine.lockstep import Agree, Batch, Go, Hello, Leave, Report, pack, unpack
from quickturn.engine.messages import (
    AddRequest,
    Admitted,
    CancelRequest,
    CheckConstraint,
    ConstraintChecked,
    EngineReady,
    EngineStats,
    HoldSession,
    LoadProgress,
    PromptScores,
    StepOutput,
    TokenOutput,
    decode_from_engine,
    encode,
)
from quickturn.engine.ranked import RankedCore
from quickturn.engine.routing import Router
from quickturn.engine.seat import (
    close_process_group,
    mesh_of,
    open_seat,
    open_store,
    require_free_process,
)
from quickturn.sampling_params import Constraint

_COMPILING_S = 0.002
_LARGEST = ("step_seconds", "step_us_predicted", "step_us_measured", "min_cacheable_tokens")
"""Figures of which the largest counts where groups are taken together; others are summed."""


class Leader:
    """Stands in for an `EngineCore` in front of several ranks. Raises RankLost from whatever it is doing when
    one of them fails. Not thread-safe.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[LoadProgress], None] | None = None,
        crew: Crew | None = None,
    ) -> None:
        """Start with the ranks of `crew` (else with processes of its own): load the model together. Raises
        ValueError or MemoryError that say what to change, RankLost.
        """
        require_free_process()
        self._mesh = mesh_of(config)
        self._span = self._mesh.attention_span
        self._crew = crew or spawn(config, "WARNING", bound=False)
        self._links = {member.rank: member.steps for member in self._crew.members}
        self._next = [Draft() for _ in range(self._mesh.dp)]
        self._busy = [False] * self._mesh.dp
        self._ran = [(0, 0, 0)] * self._mesh.dp
        """Rows, decode rows and tokens of each group's last step."""
        self._owed: list[TokenOutput] = []
        self._news: list[PromptScores] = []
        self._told = 0
        """How many of them go with outputs that `step` has given."""
        self._announce: Callable[[Admitted], None] = lambda _: None
        try:
            self._start(config, progress or (lambda _: None))
        except BaseException:
            self._crew.close()
            close_process_group()
            raise
        self._waiting = Waiting(self._core.grammars)
        self._router = Router(self._mesh.dp, self._core.ready().block_tokens)

    def _start(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        def advance(report: LoadProgress) -> None:
            self._crew.alive(report.stage)
            self._crew.check()
            progress(report)

        with self._crew.together("starting"):
            store = open_store(config.world, config.rank_timeout)
            key = secrets.token_bytes(16)
            for member in self._crew.members:
                member.steps.send(pack(Hello(member.first_host, store.port, key)))
            local = (0, sum(member.local for member in self._crew.members) + 1)
            seat = open_seat(config, store, 0, local, key, self._agree)
            self._crew.on_failed = seat.collectives.abandon
            self._ranked = RankedCore(EngineCore(config, advance, seat), seat)
            self._core = self._ranked.core
            self._agree(0)

    @property
    def last_step(self) -> LastStep:
        """The last step, of all groups together; the seconds are this rank's."""
        own = self._core.last_step
        if self._mesh.dp == 1:
            return own
        rows, decode_rows, tokens = (sum(each) for each in zip(*self._ran, strict=True))
        return LastStep(rows, decode_rows, tokens, own.seconds)

    @property
    def alarm(self) -> int:
        """A file descriptor that becomes readable when a rank fails."""
        return self._crew.alarm

    def ready(self) -> EngineReady:
        """What clients must know; of several groups of requests, their caches together."""
        ready = self._core.ready()
        groups = self._mesh.dp
        return replace(
            ready, max_requests=ready.max_requests * groups, cache_tokens=ready.cache_tokens * groups
        )

    def add(self, request: AddRequest) -> None:
        """Take a request in, for the next step."""
        if request.sampling.seed is None:
            sampling = replace(request.sampling, seed=secrets.randbits(63))
            request = replace(request, sampling=sampling)
        constraint = request.sampling.constraint
        if constraint is not None:
            outcome = self._core.grammars.outcome(constraint)
            if outcome is None:
                self._waiting.hold(request)
                for draft in self._next:
                    draft.constraints.append(constraint)
                return
            if isinstance(outcome, str):
                self._owed.append(TokenOutput(request.id, [], "error", 0, None, outcome))
                return
        group = 0
        if self._mesh.dp > 1:
            hashes = self._core.prefix_hashes(
                np.frombuffer(request.tokens, dtype=np.int32), request.cache_salt
            )
            group = self._router.choose(request, [(a, b) for a, b in hashes.tolist()])
        self._next[group].messages.append(encode(request))

    def cancel(self, request: CancelRequest) -> None:
        """End a request from outside; unknown ids are fine."""
        self._waiting.drop(request.id)
        group = self._router.of_request(request.id) if self._mesh.dp > 1 else 0
        if group is not None:
            self._next[group].messages.append(encode(request))

    def hold(self, request: HoldSession) -> None:
        """Keep a session's cache warm for a while."""
        group = self._router.of_session(request.session) if self._mesh.dp > 1 else 0
        if group is not None:
            self._next[group].messages.append(encode(request))

    def check(self, request: CheckConstraint) -> None:
        """Begin to compile a constraint, on every rank."""
        self._waiting.check(request)
        for draft in self._next:
            draft.constraints.append(request.constraint)

    def checked(self) -> list[ConstraintChecked]:
        """The constraints that were asked for and are decided now."""
        return self._waiting.checked()

    def announce(self, tell: Callable[[Admitted], None]) -> None:
        """Have `tell` called when requests get a place."""
        self._announce = tell
        self._core.announce(tell)

    def news(self) -> list[PromptScores]:
        """What clients must hear before the outputs of the last step."""
        news, self._news, self._told = self._news, [], 0
        return news

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._owed or self._waiting or any(self._busy) or any(map(bool, self._next)))

    def step(self) -> StepOutput:
        """One step of all ranks; returns what is new for the clients."""
        self._crew.check()
        # Of the step before; not everybody asks for it.
        del self._news[: self._told]
        self._told = 0
        for request in self._waiting.decided():
            self.add(request)
        if not any(self._busy) and not any(map(bool, self._next)):
            if not self._owed:
                time.sleep(_COMPILING_S)
            outputs, self._owed = self._owed, []
            return StepOutput(outputs)
        self._step(stats=False)
        outputs, self._owed = self._owed, []
        self._told = len(self._news)
        return StepOutput(outputs)

    def stats(self) -> EngineStats:
        """Counters and gauges of all groups of requests together."""
        if self._mesh.dp == 1:
            return self._core.stats()
        together: dict[str, float] = {}
        for report in self._step(stats=True):
            for name, value in report.stats.items():
                before = together.get(name, 0.0)
                together[name] = max(before, value) if name in _LARGEST else before + value
        return EngineStats(together)

    def step_bytes(self, rows: int, context: int) -> int:
        """The least bytes that a decode step of so many rows, shared out among the groups, moves on this
        rank.
        """
        return self._core.step_bytes(-(-rows // self._mesh.dp), context)

    def close(self) -> None:
        """Send the ranks away and wait until they are gone."""
        with contextlib.suppress(LinkClosed):
            for link in self._links.values():
                link.send(pack(Leave()))
        if self._crew.failure is None:
            self._core.close()
        self._crew.close()
        close_process_group()

    def _step(self, stats: bool) -> list[Report]:
        """A step of all ranks; gives the groups' reports. Outputs are owed."""
        with self._crew.together("a step"):
            now = time.monotonic()
            batches = [draft.batch(now, stats) for draft in self._next]
            self._next = [Draft() for _ in batches]
            packed = [pack(batch) for batch in batches]
            for rank, link in self._links.items():
                link.send(packed[rank // self._span])
            reports = [self._ranked.plan(batches[0])]
            for group in range(1, self._mesh.dp):
                reports.append(self._hear(group))
            several = self._mesh.dp > 1
            go = together(reports) if several else Go([report.digest for report in reports])
            word = pack(go)
            for link in self._links.values():
                link.send(word)
            outputs = self._ranked.run(go)
        self._news += self._core.news()
        self._ran = [(report.rows, report.decode_rows, report.tokens) for report in reports]
        for group, report in enumerate(reports):
            self._next[group].times += report.times
            self._next[group].stops += report.stops
            self._busy[group] = report.busy
            if report.admitted:
                self._announce(Admitted(report.admitted))
            for news in report.news:
                scores = decode_from_engine(news)
                assert isinstance(scores, PromptScores)
                self._news.append(scores)
            if group and report.outputs:
                said = decode_from_engine(report.outputs)
                assert isinstance(said, StepOutput)
                outputs = outputs + said.outputs
        self._busy[0] = self._core.has_work()
        # What this rank learned while it ran needs no report.
        self._next[0].times += self._core.times
        self._next[0].stops += self._core.too_slow
        self._core.times, self._core.too_slow = [], []
        if several:
            for output in outputs:
                if output.finish:
                    self._router.over(output.id)
        self._owed += outputs
        return reports

    def _hear(self, group: int) -> Report:
        report = unpack(self._links[group * self._span].recv())
        assert isinstance(report, Report), report
        return report

    def _agree(self, value: int) -> int:
        """The least of what all ranks say."""
        for link in self._links.values():
            said = unpack(link.recv())
            assert isinstance(said, Agree), said
            value = min(value, said.value)
        for link in self._links.values():
            link.send(pack(Agree(value)))
        return value


def together(reports: Sequence[Report]) -> Go:
    """The word for a step, from what every group plans."""
    tokens = [report.tokens for report in reports]
    return Go(
        [report.digest for report in reports],
        tokens,
        [report.samples for report in reports],
        [report.scored for report in reports],
        max(tokens) if all(report.decodes for report in reports) else 0,
    )


class Draft:
    """What a group of ranks is told before its next step."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.times: list[tuple[int, float]] = []
        self.stops: list[tuple[int, str]] = []
        self.constraints: list[Constraint] = []
        self.messages: list[bytes] = []

    def __bool__(self) -> bool:
        """Whether it is worth a step: times alone can wait."""
        return bool(self.stops or self.constraints or self.messages)

    def batch(self, now: float, stats: bool) -> Batch:
        """As a message."""
        return Batch(now, self.times, self.stops, self.constraints, self.messages, stats)
