"""What can't be promised waits, and is turned away after a bound: with a status, and with the seconds after
which another try makes sense.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from places_core import ENDLESS
from servers import PATIENCE_S, Served, http, start_server, stop_server

from quickturn.server.errors import ApiError
from quickturn.server.metrics import AnswerFigures
from quickturn.server.pace import Pace
from quickturn.server.waiting_room import Promise, QueueLimits, WaitingRoom

CORE = "places_core:PlacesCore"
HELLO = [{"role": "user", "content": "Hello"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"model": "fake", "max_tokens": 64, "messages": HELLO},
}

Make = Callable[..., Served]


@pytest.fixture
def crowded(tiny_model: Path) -> Iterator[Make]:
    """Makes servers with one place, which is taken by somebody who never ends."""
    servers: list[Served] = []
    with contextlib.ExitStack() as stack:

        def make(promise: float = 50.0, taken: bool = True, **serve: Any) -> Served:
            engine = {"max_requests": 1, "min_tps_per_user": promise}
            server = start_server(tiny_model, core=CORE, engine=engine, queue=serve)
            servers.append(server)
            if taken:
                body = {"prompt": "x", "stream": True, "priority": ENDLESS, "max_tokens": 4000}
                stream = stack.enter_context(http.stream("POST", f"{server.url}/completions", json=body))
                assert stream.status_code == 200
            return server

        yield make
    for server in servers:
        stop_server(server)


@pytest.mark.parametrize("stream", [False, True])
def test_every_api_turns_away_in_its_own_words(crowded: Make, stream: bool) -> None:
    """The status comes before any header of a stream."""
    server = crowded(seconds=0.2)
    for path, body in ENDPOINTS.items():
        answer = http.post(server.root + path, json={**body, "stream": stream})
        assert answer.status_code == 429, path
        assert int(answer.headers["retry-after"]) >= 1
        error = answer.json()["error"]
        assert "50 tokens/s for every user" in error["message"]
        assert error["type"] == "rate_limit_error"
        if path == "/v1/messages":
            assert answer.json()["type"] == "error"
        else:
            assert error["code"] == "rate_limit_exceeded"
    stats = server.wait_for(lambda stats: stats["quickturn_engine_dropped"] == 4)
    assert stats["quickturn_queue_refused_total"] == 4
    assert stats["quickturn_queue_waiting"] == 0
    with (
        openai.OpenAI(base_url=server.url, api_key="any", max_retries=0) as client,
        pytest.raises(openai.RateLimitError, match="try again in"),
    ):
        client.completions.create(model="fake", prompt="x", stream=stream)


def test_too_many_are_turned_away(crowded: Make) -> None:
    """One waits for as long as it likes to; the next is refused while it does."""
    server = crowded(requests=1, seconds=10 * PATIENCE_S)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=10 * PATIENCE_S) as client:
            body = {"prompt": "x", "stream": True}
            waits = asyncio.create_task(client.post(f"{server.url}/completions", json=body))
            await asyncio.to_thread(server.wait_for, lambda stats: stats["quickturn_queue_waiting"] == 1)
            state = (await client.get(f"{server.root}/dashboard/state")).json()
            assert state["promise"]["queue_waiting"] == 1
            assert state["promise"]["queue_retry_after_seconds"] >= 1
            assert state["promise"]["promised_tokens_per_second"] == 50
            refused = await client.post(f"{server.url}/completions", json=body)
            assert refused.status_code == 429
            assert "1 requests wait already" in refused.json()["error"]["message"]
            assert not waits.done()
            # A client that goes away while it waits leaves nothing behind.
            waits.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waits
            await asyncio.to_thread(server.wait_for, lambda stats: stats["quickturn_engine_dropped"] == 2)
            await asyncio.to_thread(server.wait_for, lambda stats: stats["quickturn_queue_waiting"] == 0)

    asyncio.run(run())


def test_who_waits_gets_the_place_that_comes_free(crowded: Make) -> None:
    server = crowded(taken=False, seconds=PATIENCE_S)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=2 * PATIENCE_S) as client:

            async def ask(stream: bool) -> httpx.Response:
                body = {"prompt": "x", "stream": stream, "max_tokens": 30, "n": 2}
                return await client.post(f"{server.url}/completions", json=body)

            answers = await asyncio.gather(*(ask(index % 2 == 0) for index in range(8)))
            assert [answer.status_code for answer in answers] == [200] * 8
            assert all(answer.text.count("a") >= 60 for answer in answers)

    asyncio.run(run())
    assert server.stats()["quickturn_queue_refused_total"] == 0
    assert server.stats()["quickturn_user_tokens_per_second"] >= 0


def test_without_a_promise_responses_begin_at_once(crowded: Make) -> None:
    server = crowded(promise=0.0)
    with http.stream("POST", f"{server.url}/completions", json={"prompt": "x", "stream": True}) as stream:
        assert stream.status_code == 200
        server.wait_for(lambda stats: stats["quickturn_engine_queued"] == 1)


@dataclass
class Guest:
    """Waits until it is let in."""

    place: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False

    async def begun(self) -> None:
        await self.place.wait()

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Patient(Guest):
    """Finds no place before the one who waits has one, and then one."""

    other: Guest = field(default_factory=Guest)
    entering: "asyncio.Task[None] | None" = None
    times: int = 0

    async def begun(self) -> None:
        self.times += 1
        if self.times == 1 and self.entering is not None:
            self.other.place.set()
            await self.entering
            raise TimeoutError


async def test_seconds_to_wait_follow_the_rate() -> None:
    """By a clock of our own: places come free every ten seconds, five wait, so the last has fifty to go."""
    now = 100.0
    room = WaitingRoom(Promise(70.0), QueueLimits(8, 1000.0), lambda: now)
    guests = [Guest() for _ in range(8)]
    tasks = [asyncio.create_task(room.enter(guest)) for guest in guests]
    await asyncio.sleep(0)
    assert room.waiting == 8
    assert room.retry_after() == 1
    # None came free so far: each takes at least as long as they have waited.
    now += 7.0
    assert room.retry_after() == 56
    now += 3.0
    for index in range(3):
        guests[index].place.set()
        await tasks[index]
        now += 10.0
    # Three in forty seconds, five wait.
    assert room.retry_after() == 67
    for index in range(3, 8):
        guests[index].place.set()
        await tasks[index]
    assert room.waiting == 0
    # A fresh crowd is measured from its own beginning.
    late, more = Guest(), [Guest() for _ in range(7)]
    crowd = [asyncio.create_task(room.enter(guest)) for guest in (late, *more)]
    await asyncio.sleep(0)
    now += 2.0
    one_more = Guest()
    with pytest.raises(ApiError) as refused:
        await room.enter(one_more)
    assert refused.value.status == 429
    assert refused.value.retry_after == 16
    assert one_more.cancelled
    assert room.refused == 1
    for task, guest in zip(crowd, (late, *more), strict=True):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert guest.cancelled
    assert room.waiting == 0


async def test_nobody_is_turned_away_unasked() -> None:
    """Five come at once, and one may wait: all get the places that there are, and the sixth none."""
    room = WaitingRoom(limits=QueueLimits(1, 1000.0), asking=60.0)
    guests = [Guest() for _ in range(5)]
    tasks = [asyncio.create_task(room.enter(guest)) for guest in guests]
    await asyncio.sleep(0)
    assert room.waiting == 1
    for guest in reversed(guests):
        guest.place.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
    assert room.refused == 0
    assert not any(guest.cancelled for guest in guests)
    first = Guest()
    waits = asyncio.create_task(room.enter(first))
    await asyncio.sleep(0)
    room.asking, late = 0.001, Guest()
    with pytest.raises(ApiError, match="1 requests wait already"):
        await room.enter(late)
    assert late.cancelled
    assert room.refused == 1
    # Who waited has a place; so the next may wait, who found none.
    guest = Patient(other=first, entering=waits)
    await asyncio.wait_for(room.enter(guest), 60.0)
    assert guest.times == 2
    assert room.refused == 1
    assert not guest.cancelled


async def test_the_bound_of_a_wait() -> None:
    """What --max-ttft says, where nothing else is said."""
    assert WaitingRoom(Promise(70.0)).longest == 30.0
    assert WaitingRoom(Promise(0.0, 2.5)).longest == 2.5
    assert WaitingRoom(Promise(70.0, 2.5), QueueLimits(None, 4.0)).longest == 4.0
    assert WaitingRoom().open
    assert not WaitingRoom(limits=QueueLimits(3)).open
    room = WaitingRoom(Promise(70.0, 0.001))
    with pytest.raises(ApiError, match=r"70 tokens/s for every user and a first token within 0.001 s"):
        await room.enter(Guest())
    assert room.waiting == 0


def test_pace_is_of_the_last_seconds() -> None:
    now = 0.0
    figures = AnswerFigures()
    pace = Pace(figures, lambda: now)
    assert pace.tokens_per_second() == 0.0
    for _ in range(20):
        figures.gap(0.1)
    now = 1.0
    assert pace.tokens_per_second() == pytest.approx(10.0)
    for second in range(2, 40):
        now = float(second)
        for _ in range(5):
            figures.gap(0.02)
        pace.tokens_per_second()
    assert pace.tokens_per_second() == pytest.approx(50.0)
