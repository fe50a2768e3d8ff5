"""Answers that end when the client goes away: a stream of server-sent events, or one body that takes long to
come."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickturn.server.direct import Writer, writer_of
from quickturn.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Result = TypeVar("Result")
Piece = TypeVar("Piece")
PieceIn = TypeVar("PieceIn", contravariant=True)
PieceOut = TypeVar("PieceOut", covariant=True)

_encode = msgspec.json.Encoder().encode


def event_of(value: object) -> bytes:
    """`value` as the JSON data of one event."""
    return b"data: " + _encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """`value` as the JSON data of one event, which bears the name of its `type`."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event_of(value)


@dataclass(frozen=True)
class StreamDialect:
    """How an API says on a stream that it is still there, and that something went wrong."""

    keepalive: bytes
    error: Callable[[ApiError], bytes]


OPENAI = StreamDialect(b": keep-alive\n\n", lambda error: event_of(error.body()))


class Frame:
    """An event in which only one string changes, made by `make` but once: what it says of all else is copied.
    The string may stand in several places.
    """

    def __init__(self, make: Callable[[str], bytes]) -> None:
        hole = secrets.token_hex(16)
        self._parts = make(hole).split(msgspec.json.encode(hole))

    def fill(self, text: str) -> bytes:
        """The event with `text`."""
        return _encode(text).join(self._parts)


class Events(Protocol[PieceIn]):
    """An answer as server-sent events; each call returns those that are due, perhaps none."""

    def begin(self) -> bytes:
        """Before anything of the answer is there."""

    def more(self, piece: PieceIn) -> bytes:
        """For a piece of the answer."""

    def end(self) -> bytes:
        """Behind the last piece."""


class Source(Protocol[PieceOut]):
    """Where an answer's pieces come from: a `Generation`."""

    async def run(self, sink: Callable[[PieceOut], None]) -> None:
        """Give all of them to `sink`. Raises ApiError."""

    def hold(self) -> None:
        """Give none until `release`."""

    def release(self) -> None:
        """Go on."""

    def cancel(self) -> None:
        """Nobody wants the rest."""


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class EventStream(Response, Generic[Piece]):
    """Sends the events of an answer as its pieces come.

    Headers go out at once. The dialect's sign of life is sent whenever nothing else was for `keepalive`
    seconds, so that proxies and clients outlast a long prompt. An ApiError becomes a last event with the
    error object. A client that reads too slowly gets fewer, longer events; when it goes away, `source` is
    cancelled.
    """

    def __init__(
        self,
        source: Source[Piece],
        events: Events[Piece],
        keepalive: float,
        dialect: StreamDialect = OPENAI,
    ) -> None:
        self._source = source
        self._events = events
        self._keepalive = keepalive
        self._dialect = dialect
        self._sent_at = 0.0
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side."""
        writer = writer_of(scope, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            writer.open(self._source.hold, self._source.release)
            pulse = asyncio.ensure_future(self._pulse(writer))
            try:
                work = asyncio.ensure_future(self._write(writer, send))
                await _first_to_end(work, asyncio.ensure_future(_gone(receive)))
            except ClientGone:
                return
            finally:
                pulse.cancel()
        finally:
            writer.close()
            self._source.cancel()

    async def _write(self, writer: Writer, send: Send) -> None:
        more, write, now = self._events.more, writer.write, time.monotonic

        def take(piece: Piece) -> None:
            events = more(piece)
            if events:
                self._sent_at = now()
                write(events)

        try:
            if events := self._events.begin():
                write(events)
            await self._source.run(take)
            if events := self._events.end():
                write(events)
        except ApiError as error:
            write(self._dialect.error(error))
        await writer.flush()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pulse(self, writer: Writer) -> None:
        self._sent_at = time.monotonic()
        while True:
            quiet = time.monotonic() - self._sent_at
            if quiet >= self._keepalive:
                self._sent_at = time.monotonic()
                if not writer.full:
                    writer.write(self._dialect.keepalive)
            else:
                await asyncio.sleep(self._keepalive - quiet)


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client of `request` (its body already read) goes
    away.

    Raises ClientGone then.
    """
    return await _first_to_end(asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive)))


async def _first_to_end(work: "asyncio.Future[Result]", gone: "asyncio.Future[None]") -> Result:
    try:
        both: set[asyncio.Future[Any]] = {work, gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGone
    finally:
        gone.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
