"""An engine core that computes nothing: every running request gets one token a step, at a fixed pace.

A request's `session` is its number. When its tokens leave is written to the file that the environment
variable INSTANT_CORE_TIMES names, so that a benchmark can tell what the server added.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quickturn.config import EngineConfig
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
)

MOST_STREAMS, MOST_TOKENS = 1024, 4096
WORDS = (1, 300)
"""Token ids to answer with, in turn: ordinary words of any vocabulary."""


@dataclass
class _Running:
    request: AddRequest
    sent: int = 0


class InstantCore:
    """See the module. The pace is INSTANT_CORE_PACE, in steps a second; 0 for as fast as it goes."""

    def __init__(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        shape = (MOST_STREAMS, MOST_TOKENS)
        self._left = np.memmap(os.environ["INSTANT_CORE_TIMES"], np.float64, "r+", shape=shape)
        pace = float(os.environ["INSTANT_CORE_PACE"])
        self._period = 1 / pace if pace else 0.0
        self._context = config.max_context or 8192
        self._next = time.monotonic()
        self._running: dict[int, _Running] = {}

    def ready(self) -> EngineReady:
        """A model of the embedded one's size, with as much context as is asked for."""
        return EngineReady(self._context, MOST_STREAMS, 1 << 24, 64, 49152, {"core": "instant"})

    def add(self, request: AddRequest) -> None:
        """Answer from the next step on."""
        self._running[request.id] = _Running(request)

    def cancel(self, request: CancelRequest) -> None:
        """Stop answering."""
        self._running.pop(request.id, None)

    def hold(self, request: HoldSession) -> None:
        """Nothing is cached."""

    def check(self, request: CheckConstraint) -> None:
        """No request here has a grammar."""

    def checked(self) -> list[ConstraintChecked]:
        """None."""
        return []

    def announce(self, tell: Callable[[Admitted], None]) -> None:
        """Nobody waits for that here."""

    def news(self) -> list[PromptScores]:
        """None."""
        return []

    def has_work(self) -> bool:
        """Whether some request isn't answered to its end."""
        return bool(self._running)

    def step(self) -> StepOutput:
        """One token for everybody."""
        now = time.monotonic()
        self._next = max(self._next + self._period, now)
        if self._next > now:
            time.sleep(self._next - now)
        outputs = []
        left = time.monotonic()
        for id, running in list(self._running.items()):
            token = WORDS[0] + running.sent % (WORDS[1] - WORDS[0]) + 1000
            self._left[int(running.request.session), running.sent] = left
            running.sent += 1
            last = running.sent == running.request.sampling.max_tokens
            outputs.append(TokenOutput(id, [token], "length" if last else "", 0 if running.sent == 1 else -1))
            if last:
                del self._running[id]
        return StepOutput(outputs)

    def stats(self) -> EngineStats:
        """None."""
        return EngineStats({})

    def close(self) -> None:
        """Nothing to give back."""
