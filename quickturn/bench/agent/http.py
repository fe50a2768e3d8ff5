"""One kept-alive HTTP/1.1 connection whose reads carry the time at which the socket gave them.

The clock is read first thing when the event loop hands over the bytes, before anything is parsed, so that
what the client does with an answer doesn't show in the times of the next.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

from quickturn.bench.agent.wire import Clock, ConnectionFault, Head


@dataclass(frozen=True)
class Target:
    """Where a server is: from a base URL such as http://127.0.0.1:8000/v1."""

    host: str
    port: int
    path: str
    tls: bool

    @staticmethod
    def of(url: str) -> "Target":
        """Raises ValueError for what is no http(s) URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000/v1")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return Target(parts.hostname, port, parts.path.rstrip("/"), parts.scheme == "https")


class _Protocol(asyncio.Protocol):
    """Turns what the socket brings into (time, bytes of the body); None ends an answer."""

    def __init__(self, now: Clock) -> None:
        self._now = now
        self._at = 0.0
        self._parser = HttpResponseParser(self)
        self.head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self.body: asyncio.Queue[tuple[float, bytes] | Exception | None] = asyncio.Queue()
        self._headers: dict[str, str] = {}
        self.transport: asyncio.Transport | None = None
        self.open = True

    def expect(self) -> None:
        """Before each request."""
        self.head = asyncio.get_running_loop().create_future()
        self.body = asyncio.Queue()
        self._headers = {}
        self._parser = HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._at = self._now()
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(ConnectionFault("malformed", f"no HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        # A body without a length ends where the connection does.
        if error is None and self.head.done() and "content-length" not in self._headers:
            chunked = self._headers.get("transfer-encoding", "") == "chunked"
            self.body.put_nowait(
                ConnectionFault("cut", "the connection closed in the answer") if chunked else None
            )
            return
        self._fail(ConnectionFault("cut", f"the connection closed: {error or 'by the server'}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if not self.head.done():
            self.head.set_result(Head(self._parser.get_status_code(), self._headers))

    def on_body(self, data: bytes) -> None:
        self.body.put_nowait((self._at, data))

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.open = False
        self.body.put_nowait(None)

    def _fail(self, error: ConnectionFault) -> None:
        self.open = False
        if not self.head.done():
            self.head.set_exception(error)
            # Nobody may be waiting for it: a connection that idles is closed, too.
            self.head.exception()
        self.body.put_nowait(error)
        if self.transport is not None:
            self.transport.close()


class Connection:
    """Requests to one server, one at a time; connects again when the server has closed."""

    def __init__(self, target: Target, now: Clock, key: str = "") -> None:
        """`key` goes along as a bearer token; `now` gives seconds."""
        self._target = target
        self._now = now
        self._key = key
        self._protocol: _Protocol | None = None
        self._used = False

    async def open(self) -> None:
        """Connect, if it isn't. Raises ConnectionFault."""
        if self._protocol is not None and self._protocol.open:
            return
        self.close()
        self._used = False
        secure = ssl.create_default_context() if self._target.tls else None
        try:
            _, self._protocol = await asyncio.get_running_loop().create_connection(
                lambda: _Protocol(self._now), self._target.host, self._target.port, ssl=secure
            )
        except OSError as error:
            raise ConnectionFault("connect", f"can't reach the server: {error}") from error

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[float, Head]:
        """Send; the time right before it, and what the answer begins with. The connection must be open.
        Raises ConnectionFault.

        Some servers close after an answer without saying so before, which may show only when the next request
        is out: that one is sent again, over a new connection, and the time is that of the second sending.
        """
        used, self._used = self._used, True
        try:
            return await self._send(method, path, body)
        except ConnectionFault:
            if not used:
                raise
        self.close()
        await self.open()
        self._used = True
        return await self._send(method, path, body)

    async def _send(self, method: str, path: str, body: bytes) -> tuple[float, Head]:
        protocol = self._protocol
        if protocol is None or protocol.transport is None:
            raise ConnectionFault("connect", "the connection is not open")
        protocol.expect()
        lines = [
            f"{method} {self._target.path}{path} HTTP/1.1",
            f"Host: {self._target.host}:{self._target.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *([f"Authorization: Bearer {self._key}"] if self._key else []),
        ]
        data = "\r\n".join([*lines, "", ""]).encode() + body
        sent = self._now()
        protocol.transport.write(data)
        return sent, await protocol.head

    async def reads(self) -> AsyncIterator[tuple[float, bytes]]:
        """The body as (time, bytes), one for each piece of a read. Raises ConnectionFault when it breaks."""
        protocol = self._protocol
        assert protocol is not None
        while (read := await protocol.body.get()) is not None:
            if isinstance(read, Exception):
                raise read
            yield read

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and whole body of a GET. Raises ConnectionFault."""
        await self.open()
        _, head = await self.request("GET", path)
        return head.status, b"".join([data async for _, data in self.reads()])

    def close(self) -> None:
        """Close; also ends what is under way."""
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.open = False
            self._protocol.transport.close()
