"""A stream between two processes that carries whole messages and tells at once when the other end is gone."""

import contextlib
import select
import socket
from typing import Final

_HEADER: Final = 8
_TOGETHER: Final = 1 << 16
"""Messages up to so many bytes are copied behind their header, so that they leave as one."""

_HUNG_UP: Final = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_KEEPALIVE: Final = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 4}
"""A machine that is gone without a word is noticed after some ten seconds."""


class LinkClosed(ConnectionError):
    """The other process closed its end, or died."""


class Link:
    """One end. Sending and receiving may happen in two threads, each in one alone."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes a connected stream socket over."""
        sock.setblocking(True)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sock = sock

    def fileno(self) -> int:
        """For those who wait for several."""
        return self._sock.fileno()

    def send(self, message: bytes) -> None:
        """Send a message whole. Raises LinkClosed."""
        header = len(message).to_bytes(_HEADER, "little")
        try:
            if len(message) <= _TOGETHER:
                self._sock.sendall(header + message)
            else:
                self._sock.sendall(header)
                self._sock.sendall(message)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def recv(self) -> bytes:
        """The next message, waiting for it. Raises LinkClosed."""
        return self._exactly(int.from_bytes(self._exactly(_HEADER), "little"))

    def wait_for_end(self) -> None:
        """Return when the other end is gone, whatever it has sent and nobody has read."""
        poll = select.poll()
        poll.register(self._sock, _HUNG_UP)
        poll.poll()

    def shut(self) -> None:
        """Break off what either end waits for, in whatever thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The other end notices."""
        self._sock.close()

    def _exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = self._sock.recv(min(count, 1 << 24))
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not part:
                raise LinkClosed("the other process is gone")
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
