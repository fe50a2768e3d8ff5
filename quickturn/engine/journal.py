"""What the server process remembers of its requests, for people who watch it: those that run, and the last
ones that ended.
"""

import time
from collections import deque
from dataclasses import dataclass, field

from quickturn.engine.messages import TokenOutput

_KEPT = 50


@dataclass(slots=True)
class Entry:
    """One request as seen from the server. Times are `time.monotonic()` seconds; `first` and `ended` are 0
    until then. `cached_tokens` is -1 until the engine has said it.
    """

    id: int
    prompt_tokens: int
    session: str
    submitted: float
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    cached_tokens: int = -1
    answer_tokens: int = 0
    finish: str = ""

    def phase(self) -> str:
        """waiting (no token yet), answering, or how it ended."""
        return self.finish or ("answering" if self.first else "waiting")

    def tokens_per_second(self) -> float:
        """The rate of the answer behind its first token; 0 while that can't be told."""
        return (self.answer_tokens - 1) / (self.last - self.first) if self.last > self.first else 0.0


@dataclass
class Journal:
    """The live requests by id, and the last ones that ended, newest first."""

    live: dict[int, Entry] = field(default_factory=dict)
    ended: deque[Entry] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def submitted(self, id: int, prompt_tokens: int, session: str) -> None:
        """A request went to the engine."""
        self.live[id] = Entry(id, prompt_tokens, session, time.monotonic())

    def delivered(self, output: TokenOutput, now: float) -> None:
        """Tokens, or the end, came back; `now` is `time.monotonic()`."""
        entry = self.live.get(output.id)
        if entry is None:
            return
        if output.tokens:
            entry.first = entry.first or now
            entry.last = now
            entry.answer_tokens += len(output.tokens)
        if output.cached_tokens > entry.cached_tokens:
            entry.cached_tokens = output.cached_tokens
        if output.finish:
            self.over(output.id, output.finish)

    def over(self, id: int, finish: str) -> None:
        """A request ended, from whichever side; unknown ids are fine."""
        entry = self.live.pop(id, None)
        if entry is not None:
            entry.finish, entry.ended = finish, time.monotonic()
            self.ended.appendleft(entry)
