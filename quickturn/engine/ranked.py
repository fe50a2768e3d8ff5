"""A rank's engine in lockstep with others: told by a batch what happens, it plans, and runs when all may."""

import time

import quickturn_control as control

from quickturn.engine.core import EngineCore
from quickturn.engine.lockstep import Batch, Go, Report
from quickturn.engine.messages import (
    AddRequest,
    CancelRequest,
    HoldSession,
    PromptScores,
    StepOutput,
    TokenOutput,
    decode_to_engine,
    encode,
)
from quickturn.engine.seat import Seat
from quickturn.execution.batch import GroupCounts

_COMPILING_S = 0.001


class RanksDiverged(RuntimeError):
    """Two ranks of a group planned different steps, or sampled different tokens."""


class RankMissing(ConnectionError):
    """A kernel gave up waiting for another rank, and with it the device all that it had to do."""


class RankedCore:
    """What the first rank and the others have in common."""

    def __init__(self, core: EngineCore, seat: Seat) -> None:
        """`core` was built with that seat."""
        self.core = core
        self.seat = seat
        self._steps = 0
        self._plan: control.StepPlan | None = None
        self._new: list[TokenOutput] = []
        self._news: list[PromptScores] = []
        self._admitted: list[int] = []
        if seat.rank:
            core.announce(lambda admitted: self._admitted.extend(admitted.ids))

    def plan(self, batch: Batch) -> Report:
        """Tell the scheduler what happened and plan the next step."""
        core = self.core
        core.tell_times(batch.times)
        for id, why in batch.stops:
            core.stop(id, why)
        for constraint in batch.constraints:
            core.grammars.outcome(constraint)
        for data in batch.messages:
            message = decode_to_engine(data)
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, CancelRequest):
                core.cancel(message)
            elif isinstance(message, HoldSession):
                core.hold(message)
        self._plan = core.plan(batch.now)
        self._steps += 1
        outputs, self._new = self._new, []
        times, core.times = core.times, []
        stops, core.too_slow = core.too_slow, []
        admitted, self._admitted = self._admitted, []
        news, self._news = self._news, []
        plan = self._plan
        scored = core.scored_tokens(plan) if plan is not None and self.seat.mesh.dp > 1 else 0
        return Report(
            0 if plan is None else plan.num_tokens,
            0 if plan is None else plan.num_samples,
            core.digest,
            encode(StepOutput(outputs)) if outputs else b"",
            times,
            stops,
            core.has_work(),
            core.stats().values if batch.stats else {},
            admitted,
            scored,
            0 if plan is None else plan.num_rows,
            0 if plan is None else plan.num_decode_rows,
            [encode(each) for each in news],
        )

    def run(self, go: Go) -> list[TokenOutput]:
        """Run what was planned; what is new stays for the next report, too. Raises RanksDiverged,
        RankMissing.
        """
        digest = go.digests[self.seat.group]
        if digest != self.core.digest:
            raise RanksDiverged(
                f"rank {self.seat.rank} planned another step than the first rank of its group (step"
                f" {self._steps}, digest {self.core.digest:08x} for {digest:08x}): ranks must never differ;"
                " this is a fault of the engine, or of a device that computes wrongly"
            )
        groups = None
        if any(go.tokens):
            groups = GroupCounts(
                tuple(max(1, count) for count in go.tokens),
                tuple(max(1, count) for count in go.samples),
                tuple(go.scored),
                go.decode_rows,
            )
        try:
            outputs = self.core.run(self._plan, groups)
        except RuntimeError as error:
            if missing := self.seat.collectives.missing():
                raise RankMissing(missing) from error
            raise
        if self.seat.rank:
            # The first rank of a group tells of its prompts.
            self._news = self.core.news()
        self._plan = None
        self._new = outputs
        return outputs

    def _add(self, request: AddRequest) -> None:
        constraint = request.sampling.constraint
        if constraint is not None:
            # The first rank has compiled it, and this one was told to at the same time.
            while (outcome := self.core.grammars.outcome(constraint)) is None:
                time.sleep(_COMPILING_S)
            if isinstance(outcome, str):
                raise ValueError(f"a grammar that the first rank uses can't be used here: {outcome}")
        try:
            self.core.add(request)
        except (ValueError, TypeError, OverflowError) as error:
            self.core.reject(request.id, str(error))
