"""Bytes of a response's body straight to its connection: what a streamed token costs is little else.

ASGI sends every piece of a body through a coroutine, behind the application's wrappers around `send`, and a
task has to be woken to await it. `DirectProtocol` offers what ASGI calls an extension: a `BodyWriter` in the
scope of each request, whose `write` is a plain function. For servers that don't, `SendWriter` does the same.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "quickturn.body"
_MOST_PENDING = 64 << 10


class Writer(Protocol):
    """Takes the pieces of a body whose head ASGI's `send` has sent, as it will send the end."""

    @property
    def full(self) -> bool:
        """Whether the client is behind: what is written now costs memory until it has caught up."""

    def open(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """Begin; the two are called when `full` becomes true and when it is false again."""

    def write(self, data: bytes) -> None:
        """Send `data`, which isn't empty; without effect when the client is gone."""

    async def flush(self) -> None:
        """Return when `send` may go on behind what was written."""

    def close(self) -> None:
        """The end, however it came about; further calls have no effect."""


def writer_of(scope: Scope, send: Send) -> Writer:
    """The fastest way to write the body that answers the request of `scope`."""
    offered = scope.get("extensions", {}).get(_EXTENSION)
    return offered if isinstance(offered, BodyWriter) else SendWriter(send)


class BodyWriter:
    """Writes chunks to the connection that a request came from; see `Writer`.

    What is written in one turn of the event loop goes out behind it, as one chunk. So tokens that came
    together cost one call of the system, and the calls of all streams stand together: between two of them a
    client that was woken takes over caches and, on a full machine, the core.
    """

    def __init__(self, protocol: "DirectProtocol", cycle: RequestResponseCycle) -> None:
        self._protocol = protocol
        self._cycle = cycle
        self._transport = protocol.transport
        self._loop = asyncio.get_running_loop()
        self._due = b""
        self.on_full: Callable[[], None]
        self.on_room: Callable[[], None]

    @property
    def full(self) -> bool:
        """See `Writer`."""
        return self._protocol.flow.write_paused

    def open(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """See `Writer`."""
        self.on_full, self.on_room = on_full, on_room
        self._protocol.writer = self
        if self.full:
            on_full()

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        if self._due:
            self._due += data
        else:
            self._due = data
            self._loop.call_soon(self._send)

    async def flush(self) -> None:
        """See `Writer`."""
        self._send()

    def _send(self) -> None:
        data, self._due = self._due, b""
        if data and not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def close(self) -> None:
        """See `Writer`."""
        self._protocol.writer = None


class DirectProtocol(HttpToolsProtocol):
    """Uvicorn's protocol for HTTP/1.1 with a `BodyWriter` for each request, and with a bound on the time that
    the head of one takes: a connection that says nothing, or never comes to the point, is closed.
    """

    head_seconds = 60.0
    writer: BodyWriter | None = None
    """Of the response that is being written: a connection has one at a time."""
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._forget_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request's first bytes came."""
        super().on_message_begin()
        if self._head_due is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """The request's scope is there."""
        self._forget_head()
        super().on_headers_complete()
        # The application starts in a turn of its own, behind this one.
        extensions: dict[str, Any] = {_EXTENSION: BodyWriter(self, self.cycle)}
        self.scope["extensions"] = extensions

    def _expect_head(self) -> None:
        self._head_due = self.loop.call_later(self.head_seconds, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def pause_writing(self) -> None:
        """The transport holds more than it should."""
        super().pause_writing()
        if self.writer is not None:
            self.writer.on_full()

    def resume_writing(self) -> None:
        """It has got rid of it, or the connection is gone."""
        super().resume_writing()
        if self.writer is not None:
            self.writer.on_room()


class SendWriter:
    """Gives what is written to `send` in a task of its own; see `Writer`."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending = bytearray()
        self._news = asyncio.Event()
        self._last = False
        self._task: asyncio.Task[None] | None = None
        self.full = False

    def open(self, on_full: Callable[[], None], on_room: Callable[[], None]) -> None:
        """See `Writer`."""
        self._on_full, self._on_room = on_full, on_room
        self._task = asyncio.get_running_loop().create_task(self._run())

    def write(self, data: bytes) -> None:
        """See `Writer`."""
        if self._task is None or self._task.done():
            return
        self._pending += data
        self._news.set()
        if len(self._pending) > _MOST_PENDING and not self.full:
            self.full = True
            self._on_full()

    async def flush(self) -> None:
        """Raises what `send` raised."""
        self._last = True
        self._news.set()
        if self._task is not None:
            await self._task

    def close(self) -> None:
        """See `Writer`."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while self._pending or not self._last:
            await self._news.wait()
            self._news.clear()
            data, self._pending = bytes(self._pending), bytearray()
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            if self.full:
                self.full = False
                self._on_room()
