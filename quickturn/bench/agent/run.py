"""Holds so many sessions at a time until all are over: each user sends the next turn when the answer before
is there and the think time has passed.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from quickturn.bench.agent.asking import Asking, ask
from quickturn.bench.agent.records import Record
from quickturn.bench.agent.sessions import Session
from quickturn.bench.agent.talk import Answer, Talk
from quickturn.bench.agent.wire import Clock, Wire

RETRIED = ("http 429", "http 503")
WAIT_S = 1.0
MOST_WAIT_S = 30.0


@dataclass(frozen=True)
class Pace:
    """`concurrency` sessions live at a time; recorded think times times `think_scale`; a refusal that asks to
    wait is tried again `retries` times; no turn begins after `limit` seconds.
    """

    concurrency: int
    think_scale: float = 0.0
    retries: int = 3
    limit: float = float("inf")

    def __post_init__(self) -> None:
        """Refuse what can't be run."""
        if self.concurrency < 1 or self.think_scale < 0 or self.retries < 0:
            raise ValueError(f"concurrency must be at least 1, think scale and retries at least 0: {self}")


@dataclass
class Run:
    """What a run measured. `full_until`: until then all users were at work, in seconds since it began;
    `given_up` sessions ended early for an error, `left_out` turns were not sent, for that or for the time
    limit.
    """

    records: list[Record] = field(default_factory=list)
    seconds: float = 0.0
    full_until: float = 0.0
    given_up: int = 0
    left_out: int = 0


@dataclass
class Floor:
    """Where sessions are held: how to reach the server, how to ask, and the clock."""

    wires: Callable[[], Wire]
    asking: Asking
    pace: Pace
    now: Clock
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with turns over and turns in all."""

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self.now() - self.asking.began


async def hold(floor: Floor, sessions: Sequence[Session], talks: Sequence[Talk]) -> Run:
    """Hold `sessions`, their `talks` in the same order, to the end of all."""
    waiting = deque(zip(sessions, talks, strict=True))
    total = sum(len(session.turns) for session in sessions)
    run = Run()
    ends: list[float] = []
    over = 0

    def tell(turns: int) -> None:
        nonlocal over
        over += turns
        floor.progress(over, total)

    async def user() -> None:
        while waiting:
            session, talk = waiting.popleft()
            wire = floor.wires()
            try:
                await _converse(floor, run, session, talk, wire, tell)
            finally:
                wire.close()
        ends.append(floor.elapsed())

    await asyncio.gather(*(user() for _ in range(min(floor.pace.concurrency, len(sessions)))))
    run.seconds = floor.elapsed()
    run.full_until = min(ends)
    return run


async def _converse(
    floor: Floor, run: Run, session: Session, talk: Talk, wire: Wire, tell: Callable[[int], None]
) -> None:
    for index, turn in enumerate(session.turns):
        think = turn.think * floor.pace.think_scale
        if index and think > 0:
            await floor.sleep(think)
        left = len(session.turns) - index
        if floor.elapsed() > floor.pace.limit:
            run.left_out += left
            tell(left)
            return
        record, answer = await _ask(floor, run, session, talk, wire, index)
        if answer is None:
            run.given_up += 1
            run.left_out += left - 1
            tell(left)
            return
        talk.answered(index, turn.prompt if record.prompt is None else record.prompt, answer)
        tell(1)


async def _ask(
    floor: Floor, run: Run, session: Session, talk: Talk, wire: Wire, index: int
) -> tuple[Record, Answer | None]:
    """One turn, tried again while the server asks to wait; every try leaves its record."""
    turn = session.turns[index]
    known = talk.sending(index)
    for attempt in range(floor.pace.retries + 1):
        record, answer = await ask(wire, floor.asking, talk, session.name, index, turn.answer, floor.now)
        record.ceiling = talk.ceiling(index, known, turn.prompt if record.prompt is None else record.prompt)
        run.records.append(record)
        if record.error not in RETRIED or attempt == floor.pace.retries:
            break
        await floor.sleep(min(MOST_WAIT_S, WAIT_S if record.retry_after is None else record.retry_after))
    return record, answer
