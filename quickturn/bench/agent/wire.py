"""What a connection to a server is to the rest of the benchmark, however it is made."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

Clock = Callable[[], float]
"""Gives seconds that never go back."""


class ConnectionFault(Exception):
    """The connection could not be made, broke, or carried no HTTP. `kind` is what it counts as."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True)
class Head:
    """Status and headers (lower-case names) of an answer."""

    status: int
    headers: dict[str, str]


class Wire(Protocol):
    """What a connection does; `http.Connection` is the real one."""

    async def open(self) -> None:
        """Connect, if it isn't."""

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[float, Head]:
        """Send; the time right before it, and the answer's beginning."""

    def reads(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body's reads with their times."""

    def close(self) -> None:
        """Close."""
