"""How fast answers come now, as their readers see it."""

import time
from collections import deque
from collections.abc import Callable

from quickturn.server.metrics import AnswerFigures

_WINDOW_S = 10.0
_BETWEEN_S = 0.5


class Pace:
    """Tokens a second that a user gets, over the last seconds; from figures that are counted anyway."""

    def __init__(self, answers: AnswerFigures, clock: Callable[[], float] = time.monotonic) -> None:
        """Of the answers that these figures count."""
        self._answers = answers
        self._clock = clock
        self._samples: deque[tuple[float, int, float]] = deque()

    def tokens_per_second(self) -> float:
        """Since about ten seconds ago, or since the last call if that was earlier; 0 without any answer."""
        now = self._clock()
        gaps, seconds = self._answers.gaps()
        if not self._samples or now - self._samples[-1][0] >= _BETWEEN_S:
            self._samples.append((now, gaps, seconds))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW_S:
            self._samples.popleft()
        _, before, spent = self._samples[0]
        return (gaps - before) / (seconds - spent) if seconds > spent else 0.0
