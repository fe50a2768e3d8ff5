"""Where requests wait for a place while the engine can't give one without breaking its promise, and where
those are turned away that would wait too long.

A request is submitted at once: the scheduler knows best whose turn it is. Its response begins when it has a
place, so that a client that is turned away gets a status, and not a stream that ends badly.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from quickturn.server.errors import ApiError

DEFAULT_REQUESTS = 256
DEFAULT_SECONDS = 30.0
ASKING_S = 0.5
_RATE_WINDOW_S = 60.0
_LONGEST_RETRY_S = 3600


@dataclass(frozen=True)
class Promise:
    """What the operator promises: tokens a second to every user, seconds to the first token; 0 for none."""

    min_tps_per_user: float = 0.0
    max_ttft: float = 0.0

    def __bool__(self) -> bool:
        """Whether anything is promised."""
        return bool(self.min_tps_per_user or self.max_ttft)

    def __str__(self) -> str:
        """In words, for those who are turned away."""
        said = []
        if self.min_tps_per_user:
            said.append(f"{self.min_tps_per_user:g} tokens/s for every user")
        if self.max_ttft:
            said.append(f"a first token within {self.max_ttft:g} s")
        return " and ".join(said)


@dataclass(frozen=True)
class QueueLimits:
    """How many requests wait at most, and for how many seconds. None: as long as was promised, or a
    default.
    """

    requests: int | None = None
    seconds: float | None = None


class Entering(Protocol):
    """What waits: a `Generation`."""

    async def begun(self) -> None:
        """Return when it has a place, or has ended."""

    def cancel(self) -> None:
        """Nobody wants it any more."""


@dataclass
class WaitingRoom:
    """Counts who waits, and how fast places come free. Without a promise and without limits nobody waits
    here: responses begin at once.

    Those who came together all wait until the engine has looked at them, in its next step, also where there
    are places for all. So one who finds too many waiting is turned away only if `asking` seconds bring
    neither a place nor room to wait.
    """

    promise: Promise = field(default_factory=Promise)
    limits: QueueLimits = field(default_factory=QueueLimits)
    clock: Callable[[], float] = time.monotonic
    asking: float = ASKING_S
    waiting: int = 0
    refused: int = 0

    def __post_init__(self) -> None:
        """Nobody waits yet."""
        limits, promise = self.limits, self.promise
        self.open = not promise and limits.requests is None and limits.seconds is None
        self.most = DEFAULT_REQUESTS if limits.requests is None else limits.requests
        self.longest = limits.seconds if limits.seconds is not None else promise.max_ttft or DEFAULT_SECONDS
        self._entered: deque[float] = deque()
        self._crowded_since = 0.0

    async def enter(self, request: Entering) -> None:
        """Return when the request has a place. Raises ApiError 429, and cancels it, when too many wait or it
        waited too long; cancels it also if whoever called does not wait any longer.
        """
        if self.open:
            return
        try:
            await self._enter(request)
        except BaseException:
            request.cancel()
            raise

    async def _enter(self, request: Entering) -> None:
        if self.waiting >= self.most:
            if await _begun_within(min(self.asking, self.longest), request):
                return
            if self.waiting >= self.most:
                raise self._turn_away(f"{self.waiting} requests wait already")
        if not self.waiting:
            self._crowded_since = self.clock()
            self._entered.clear()
        self.waiting += 1
        try:
            if not await _begun_within(self.longest, request):
                raise self._turn_away(f"this one waited {self.longest:g} s for a place")
            self._entered.append(self.clock())
        finally:
            self.waiting -= 1

    def retry_after(self) -> int:
        """Seconds after which those who wait now will have a place, by the rate at which places came free
        lately. While none did, one takes at least as long as the queue has waited for it.
        """
        now = self.clock()
        while self._entered and self._entered[0] < now - _RATE_WINDOW_S:
            self._entered.popleft()
        elapsed = min(now - self._crowded_since, _RATE_WINDOW_S)
        each = elapsed / max(1, len(self._entered))
        return min(max(1, math.ceil(each * max(1, self.waiting))), _LONGEST_RETRY_S)

    def _turn_away(self, why: str) -> ApiError:
        self.refused += 1
        seconds = self.retry_after()
        promised = f"{self.promise} is promised here" if self.promise else "every place is taken"
        return ApiError(
            429,
            f"{promised}, and {why}: try again in {seconds} s",
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            retry_after=seconds,
        )


async def _begun_within(seconds: float, request: Entering) -> bool:
    """Whether the request has a place in time."""
    try:
        async with asyncio.timeout(seconds):
            await request.begun()
    except TimeoutError:
        return False
    return True
