"""The same sessions straight through the engine loop in this process: no server, no tokenizer, no text.

Needs what the engine itself needs and nothing more, so that a bare GPU machine can run it. Prompts are token
ids, and an answer's ids are what the next turn carries.
"""

import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quickturn.bench.agent.ceiling import PrefixTree
from quickturn.bench.agent.records import Record
from quickturn.bench.agent.run import Pace, Run
from quickturn.bench.agent.sessions import Session, limited, salted, scaled
from quickturn.bench.agent.talk import Answer, TokenTalk
from quickturn.bench.agent.wire import Clock
from quickturn.engine.messages import AddRequest, StepOutput
from quickturn.sampling_params import SamplingParams

_LOW = 10
"""Smaller ids are often control tokens; an engine doesn't care, but ids are the same everywhere so."""
_WARM_TOKENS = 600
_WARM_LONG_TOKENS = 9000
_WARM_ANSWER = 16


class Core(Protocol):
    """What is needed of `EngineCore`."""

    def add(self, request: AddRequest) -> None:
        """Take a request in."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> StepOutput:
        """One step of the loop."""


@dataclass
class _User:
    """A session that is being held: the turn that is out, and what came of it."""

    session: Session
    talk: TokenTalk
    at: int = 0
    known: int = 0
    record: Record = field(default_factory=lambda: Record("", 0, 0.0, 0))
    ids: list[int] = field(default_factory=list)


class Offline:
    """Holds sessions on one engine. Not for reuse: one run."""

    def __init__(self, core: Core, vocab_size: int, pace: Pace, now: Clock = time.perf_counter) -> None:
        """Token ids are below `vocab_size`; `now` gives seconds."""
        self._core = core
        self._range = _LOW, vocab_size
        self._pace = pace
        self._now = now
        self._seen = PrefixTree()
        self._began = 0.0
        self._next_id = 0
        self._out: dict[int, _User] = {}
        self._thinking: list[tuple[float, int, _User]] = []
        self.run = Run()

    def hold(
        self,
        sessions: Sequence[Session],
        progress: Callable[[int, int], None] = lambda done, total: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Run:
        """Hold all sessions to their end; `progress(turns over, of all)`."""
        waiting = deque(_User(session, TokenTalk(session, self._seen, *self._range)) for session in sessions)
        total = sum(len(session.turns) for session in sessions)
        full_until: float | None = None
        self._began = self._now()
        for _ in range(min(self._pace.concurrency, len(waiting))):
            self._send(waiting.popleft())
        while self._out or self._thinking:
            while self._thinking and self._thinking[0][0] <= self._now():
                self._send(heapq.heappop(self._thinking)[2])
            if not self._core.has_work():
                sleep(max(0.0, min(0.05, self._thinking[0][0] - self._now())) if self._thinking else 0.0)
                continue
            for user in self._take(self._core.step(), self._now()):
                if user.at < len(user.session.turns) and self._elapsed() <= self._pace.limit:
                    self._after_thinking(user)
                    continue
                self.run.left_out += len(user.session.turns) - user.at
                if waiting and self._elapsed() <= self._pace.limit:
                    self._send(waiting.popleft())
                elif full_until is None:
                    full_until = self._elapsed()
            progress(sum(not record.error for record in self.run.records), total)
        self.run.left_out += sum(len(user.session.turns) for user in waiting)
        self.run.seconds = self._elapsed()
        self.run.full_until = self.run.seconds if full_until is None else full_until
        return self.run

    def _elapsed(self) -> float:
        return self._now() - self._began

    def _after_thinking(self, user: _User) -> None:
        think = user.session.turns[user.at].think * self._pace.think_scale
        if think > 0:
            self._next_id += 1
            heapq.heappush(self._thinking, (self._now() + think, self._next_id, user))
        else:
            self._send(user)

    def _send(self, user: _User) -> None:
        turn = user.session.turns[user.at]
        prompt = user.talk.prompt(user.at)
        user.known = user.talk.sending(user.at)
        user.ids = []
        self._next_id += 1
        self._out[self._next_id] = user
        request = AddRequest(
            self._next_id,
            prompt.tobytes(),
            SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True),
            arrival=time.monotonic(),
            session=user.session.name,
        )
        user.record = Record(user.session.name, user.at, self._elapsed(), turn.answer, prompt=len(prompt))
        self._core.add(request)

    def _take(self, step: StepOutput, at: float) -> list[_User]:
        """Record what a step brought; the users whose answer is complete."""
        over = []
        for output in step.outputs:
            user = self._out[output.id]
            record = user.record
            if output.tokens:
                record.arrivals.append(at - self._began)
                record.counts.append(len(output.tokens))
                user.ids += output.tokens
            if output.cached_tokens >= 0:
                record.cached = output.cached_tokens
            if output.finish:
                del self._out[output.id]
                self._end(user, output.finish, output.error)
                over.append(user)
        return over

    def _end(self, user: _User, finish: str, error: str) -> None:
        record, prompt = user.record, user.record.prompt or 0
        record.done = record.arrivals[-1] if record.arrivals else self._elapsed()
        record.finish, record.answer = finish, len(user.ids)
        record.ceiling = user.talk.ceiling(user.at, user.known, prompt)
        self.run.records.append(record)
        if finish in ("error", "cancelled", "timeout"):
            record.error, record.detail = finish, error
            self.run.given_up += 1
            self.run.left_out += len(user.session.turns) - user.at - 1
            user.at = len(user.session.turns)
            return
        user.talk.answered(user.at, prompt, Answer(ids=tuple(user.ids), tokens=len(user.ids)))
        user.at += 1


def warm_up(core: Core, vocab_size: int, sessions: Sequence[Session]) -> float:
    """Hold the beginnings of `sessions` at once, cut short, so that kernels are built and graphs recorded;
    seconds. Raises ValueError when the engine refuses one.
    """
    short = [
        salted(limited(_short(session, number), turns=2), f"warm-up{number}")
        for number, session in enumerate(sessions)
    ]
    began = time.perf_counter()
    run = Offline(core, vocab_size, Pace(len(short))).hold(short)
    failed = [record.detail for record in run.records if record.error]
    if failed:
        raise ValueError(f"the engine refused a warm-up request: {failed[0]}")
    return time.perf_counter() - began


def _short(session: Session, number: int) -> Session:
    """One user with a prompt of several chunks, the others with little more than none."""
    first = session.turns[0]
    tokens = _WARM_TOKENS if number else _WARM_LONG_TOKENS
    return scaled(session, min(1.0, tokens / first.prompt), min(1.0, _WARM_ANSWER / first.answer))
