"""Answers that end when the client goes away: a stream of server-sent events, or one body that takes long to
come."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickturn.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Result = TypeVar("Result")


def event_of(value: object) -> bytes:
    """`value` as the JSON data of one event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """`value` as the JSON data of one event, which bears the name of its `type`."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event_of(value)


@dataclass(frozen=True)
class StreamDialect:
    """How an API says on a stream that it is still there, and that something went wrong."""

    keepalive: bytes
    error: Callable[[ApiError], bytes]


OPENAI = StreamDialect(b": keep-alive\n\n", lambda error: event_of(error.body()))


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


class EventStream(Response):
    """Sends what `events` yields, each a complete server-sent event.

    Headers go out at once. The dialect's sign of life is sent whenever nothing else was for `keepalive`
    seconds, so that proxies and clients outlast a long prompt. An ApiError becomes a last event with the
    error object. `on_end` is called however it ends.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        keepalive: float,
        on_end: Callable[[], None] = lambda: None,
        dialect: StreamDialect = OPENAI,
    ) -> None:
        self._events = events
        self._keepalive = keepalive
        self._on_end = on_end
        self._dialect = dialect
        self._sent_at = 0.0
        self.status_code = 200
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI side."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            writer = asyncio.ensure_future(self._write(send))
            pulse = asyncio.ensure_future(self._pulse(send))
            try:
                await _first_to_end(writer, asyncio.ensure_future(_gone(receive)))
            except ClientGone:
                return
            finally:
                pulse.cancel()
        finally:
            self._on_end()

    async def _write(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._sent_at = time.monotonic()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": self._dialect.error(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pulse(self, send: Send) -> None:
        self._sent_at = time.monotonic()
        while True:
            quiet = time.monotonic() - self._sent_at
            if quiet >= self._keepalive:
                self._sent_at = time.monotonic()
                await send({"type": "http.response.body", "body": self._dialect.keepalive, "more_body": True})
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
