"""Streams of events at their own level: an answer that is made here, a real HTTP server, a client that reads
as it likes.
"""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from quickturn.engine.messages import TokenOutput
from quickturn.engine.stream import EngineDied, RequestStream
from quickturn.sampling_params import SamplingParams
from quickturn.server.direct import DirectProtocol
from quickturn.server.errors import ApiError, invalid
from quickturn.server.generation import Generation, Piece, Prompt
from quickturn.server.metrics import Metrics
from quickturn.server.streaming import EventStream, Frame

LIMIT_S = 60.0
SERVERS = {"direct": DirectProtocol, "httptools": "httptools", "h11": "h11"}
"""Uvicorn with the extension, and two servers without it."""


class Answer:
    """A source of pieces and their events at once: a piece is the event's bytes."""

    def __init__(self, pieces: Sequence[bytes], error: ApiError | None = None) -> None:
        self._pieces = pieces
        self._error = error
        self._free = asyncio.Event()
        self._free.set()
        self.held = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.given = 0

    async def run(self, sink: Callable[[bytes], None]) -> None:
        for count, piece in enumerate(self._pieces):
            await self._free.wait()
            if count % 3 == 0:
                await asyncio.sleep(0)
            sink(piece)
            self.given += 1
        if self._error is not None:
            raise self._error

    def hold(self) -> None:
        self.held.set()
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def cancel(self) -> None:
        self.cancelled.set()

    def begin(self) -> bytes:
        return b"data: begin\n\n"

    def more(self, piece: bytes) -> bytes:
        return piece

    def end(self) -> bytes:
        return b"data: end\n\n"


@asynccontextmanager
async def connected(answer: Answer, server: str, ask: bool = True) -> AsyncIterator[socket.socket]:
    """A connection to a server that answers all questions with `answer`; one is sent if `ask`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(answer, answer, 60.0)(scope, receive, send)

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=SERVERS[server], lifespan="off", log_level="critical")
    uvicorn_server = uvicorn.Server(config)
    serving = asyncio.create_task(uvicorn_server.serve([listening]))
    client = socket.socket()
    # Small, so that the client's side holds little; the server's side may hold megabytes.
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    try:
        while not uvicorn_server.started:
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, listening.getsockname())
        if ask:
            await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        yield client
    finally:
        client.close()
        uvicorn_server.should_exit = uvicorn_server.force_exit = True
        await asyncio.wait_for(serving, LIMIT_S)


async def body_of(client: socket.socket) -> bytes:
    """The body of the one response, its chunks undone."""
    loop, data = asyncio.get_running_loop(), bytearray()
    while not data.endswith(b"0\r\n\r\n"):
        came = await asyncio.wait_for(loop.sock_recv(client, 1 << 20), LIMIT_S)
        assert came, data[-200:]
        data += came
    at = data.index(b"\r\n\r\n") + 4
    assert b"transfer-encoding: chunked" in data[:at].lower()
    body = bytearray()
    while at < len(data):
        line = data.index(b"\r\n", at)
        length = int(data[at:line], 16)
        at = line + 2 + length
        body += data[line + 2 : at]
        assert data[at : at + 2] == b"\r\n"
        at += 2
    return bytes(body)


@pytest.mark.parametrize("server", SERVERS)
async def test_every_event_comes_once_and_in_order(server: str) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pieces = [b"data: %d %b\n\n" % (i, b"x" * rng.choice([0, 1, 100, 70_000])) for i in range(60)]
    answer = Answer(pieces)
    async with connected(answer, server) as client:
        assert await body_of(client) == b"data: begin\n\n" + b"".join(pieces) + b"data: end\n\n"
        await asyncio.wait_for(answer.cancelled.wait(), LIMIT_S)


@pytest.mark.parametrize("server", SERVERS)
async def test_who_does_not_read_holds_the_answer_and_still_gets_all_of_it(server: str) -> None:
    pieces = [b"data: %06d %b\n\n" % (i, b"x" * 4096) for i in range(4096)]
    answer = Answer(pieces)
    async with connected(answer, server) as client:
        await asyncio.wait_for(answer.held.wait(), LIMIT_S)
        assert answer.given < len(pieces), "the answer was never held"
        assert await body_of(client) == b"data: begin\n\n" + b"".join(pieces) + b"data: end\n\n"


@pytest.mark.parametrize("server", SERVERS)
async def test_who_leaves_without_reading_cancels(server: str) -> None:
    answer = Answer([b"data: %b\n\n" % (b"x" * 4096)] * 100_000)
    async with connected(answer, server) as client:
        await asyncio.wait_for(answer.held.wait(), LIMIT_S)
        client.close()
        await asyncio.wait_for(answer.cancelled.wait(), LIMIT_S)
        assert answer.given < 100_000


@pytest.mark.parametrize("server", SERVERS)
async def test_an_error_on_the_way_is_the_last_event(server: str) -> None:
    answer = Answer([b"data: 1\n\n"], invalid("x", "it went wrong"))
    async with connected(answer, server) as client:
        events = (await body_of(client)).split(b"\n\n")
    assert events[:2] == [b"data: begin", b"data: 1"]
    assert json.loads(events[2].removeprefix(b"data: "))["error"]["message"] == "it went wrong"
    assert events[3:] == [b""]


class Watched(DirectProtocol):
    made: ClassVar[list["Watched"]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)


HALF_A_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nA:"


@pytest.mark.parametrize(("asked_before", "said"), [(False, b""), (False, HALF_A_HEAD), (True, HALF_A_HEAD)])
async def test_a_head_that_never_ends_ends_the_connection(
    asked_before: bool, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVERS, "direct", Watched)
    if not asked_before:
        monkeypatch.setattr(Watched, "head_seconds", 0.1)
    async with connected(Answer([]), "direct", ask=asked_before) as client:
        loop = asyncio.get_running_loop()
        if asked_before:
            await body_of(client)
            monkeypatch.setattr(Watched, "head_seconds", 0.1)
        try:
            await loop.sock_sendall(client, said)
            assert await asyncio.wait_for(loop.sock_recv(client, 1), LIMIT_S) == b""
        except ConnectionError:
            pass  # Closed before all was said.


async def test_a_head_that_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SERVERS, "direct", Watched)
    monkeypatch.setattr(Watched, "made", [])
    answer = Answer([b"data: 1\n\n"])
    answer.hold()
    async with connected(answer, "direct") as client:
        await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), LIMIT_S)
        assert [protocol._head_due for protocol in Watched.made] == [None]


def test_a_frame_is_what_it_was_made_by() -> None:
    def make(text: str) -> bytes:
        return json.dumps({"a": text, "b": [1, text]}, ensure_ascii=False, separators=(",", ":")).encode()

    frame = Frame(make)
    for text in ("", " word", '"}\\', "\n\t\x00\x1f", "世界🙂", "</script>", "\u2028"):
        assert json.loads(frame.fill(text)) == json.loads(make(text))
    assert frame.fill("plain") == make("plain")


def test_a_listener_gets_what_came_before_it_and_what_was_held_joined() -> None:
    stream, got = RequestStream(lambda id, finished: None, 1), list[TokenOutput]()
    failures: list[EngineDied] = []
    stream.put(TokenOutput(1, [1]))
    stream.put(TokenOutput(1, [2]))
    stream.listen(got.append, failures.append)
    assert [output.tokens for output in got] == [[1, 2]]
    stream.put(TokenOutput(1, [3]))
    stream.hold()
    stream.put(TokenOutput(1, [4]))
    stream.put(TokenOutput(1, [5]))
    stream.fail("gone")
    assert [output.tokens for output in got] == [[1, 2], [3]]
    assert failures == []
    stream.release()
    assert [output.tokens for output in got] == [[1, 2], [3], [4, 5]]
    assert [str(failure) for failure in failures] == ["gone"]


class _Reader:
    """Fails at token 13."""

    def push(self, tokens: Sequence[int], finish: str = "") -> Any:
        if 13 in tokens:
            raise ZeroDivisionError
        return SimpleNamespace(content=list(tokens), tokens=len(tokens), finish=finish, stopped_here=False)


def generation(streams: list[RequestStream], cancelled: list[int], choices: int) -> Generation[list[int]]:
    """A generation whose streams are put in `streams`, to be fed by hand."""

    def submit(*_: Any, **__: Any) -> RequestStream:
        streams.append(RequestStream(lambda id, finished: cancelled.append(id), len(streams)))
        return streams[-1]

    state: Any = SimpleNamespace(engine=SimpleNamespace(submit=submit), metrics=Metrics())
    return Generation(state, [Prompt([1], [SamplingParams()] * choices)], lambda sampling: _Reader())


async def test_what_goes_wrong_in_one_answer_ends_that_request_alone() -> None:
    streams, cancelled, got = list[RequestStream](), list[int](), list[Piece[list[int]]]()
    bad, good = generation(streams, cancelled, 2), generation(streams, cancelled, 1)
    runs = [asyncio.create_task(each.run(got.append)) for each in (bad, good)]
    await asyncio.sleep(0)
    for index, tokens in enumerate(([13], [2], [3])):
        streams[index].put(TokenOutput(index, list(tokens)))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(runs[0], LIMIT_S)
    assert sorted(cancelled) == [0, 1], "both choices of the request that failed, and no other"
    streams[2].put(TokenOutput(2, [4], "stop"))
    await asyncio.wait_for(runs[1], LIMIT_S)
    assert [piece.content for piece in got if piece.content != [2]] == [[3], [4]]


async def test_a_run_that_is_ended_cancels_its_choices() -> None:
    streams, cancelled = list[RequestStream](), list[int]()
    run = asyncio.create_task(generation(streams, cancelled, 2).run(lambda piece: None))
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)
    assert sorted(cancelled) == [0, 1]
