"""The benchmark over real sockets: servers that are fine, and servers that aren't. Nothing here looks at a
clock but the time limit that every run has.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quickturn.bench.agent.figures import figures
from quickturn.bench.agent.http import Target
from quickturn.bench.agent.load import Load
from quickturn.bench.agent.measure import Measured, Server, measure
from quickturn.bench.agent.run import Pace
from quickturn.bench.agent.synthetic import Shape
from quickturn.bench.agent.watch import Watch, watched

LIMIT_S = 60.0


def measured(url: str, model: str, sessions: int = 4, users: int = 2, **options: Any) -> Measured:
    load = Load(sessions, 1, shape=Shape(first=60, grow=10, turns=(3, 3), answer=5)).make()

    async def limited() -> Measured:
        async with asyncio.timeout(LIMIT_S):
            return await measure(Server(url, model, **options), load, Pace(users))

    return asyncio.run(limited())


def test_a_server_that_is_fine(bench_server: Callable[[], str]) -> None:
    done = measured(bench_server(), "")
    found = figures(done.run, 1)
    assert (found["requests"], found["errors"], found["exact_counts"]) == (12, {}, True)
    assert done.server["model"] == "fine"
    assert done.server["models"]["data"] == [{"id": "fine"}]
    # A token a word, and 3 for each message: the probes find the one and not the other.
    assert done.warm_up["tokens_per_word"] == 1.0
    assert done.warm_up["tokens_per_word_measured"] is True
    prompts = {(record.turn, record.prompt) for record in done.run.records}
    assert prompts == {(0, 63), (1, 63 + 8 + 13), (2, 63 + 2 * (8 + 13))}
    assert found["tokens"]["cached"] == sum((record.prompt or 0) // 2 for record in done.run.records)
    assert done.client["cpu_share"] >= 0.0
    times = [time for record in done.run.records for time in (record.sent, *record.arrivals, record.done)]
    assert all(time >= 0.0 for time in times)
    for record in done.run.records:
        assert record.sent <= record.arrivals[0]
        assert record.arrivals == sorted(set(record.arrivals))
        assert sum(record.counts) == record.answer == 5


@pytest.mark.parametrize("model", ["closes", "drops"])
def test_connections_that_the_server_closes_are_made_again(
    bench_server: Callable[[], str], model: str
) -> None:
    found = figures(measured(bench_server(), model).run, 1)
    assert (found["requests"], found["errors"]) == (12, {})


def test_a_server_that_refuses_unknown_fields_is_asked_without_them(bench_server: Callable[[], str]) -> None:
    done = measured(bench_server(), "strict")
    assert done.warm_up["exact_lengths"] is False
    assert figures(done.run, 1)["errors"] == {}


def test_a_server_without_usage(bench_server: Callable[[], str]) -> None:
    done = measured(bench_server(), "silent")
    found = figures(done.run, 1)
    assert done.warm_up["tokens_per_word_measured"] is False
    assert (found["requests"], found["tokens"]["prompt"], found["tokens"]["answer"]) == (12, None, 60)
    assert found["cache"]["known"] is False


def test_a_server_that_dies_in_the_middle(bench_server: Callable[[], str]) -> None:
    run = measured(bench_server(), "dies").run
    found = figures(run, 1)
    assert 0 < found["requests"] < 12
    turns = Counter(record.session for record in run.records if not record.error)
    whole = sum(count == 3 for count in turns.values())
    assert sum(found["errors"].values()) == found["sessions_given_up"] == 4 - whole
    assert set(found["errors"]) <= {"cut", "connect"}
    assert "cut" in found["errors"]


@pytest.mark.parametrize(("model", "kind"), [("garbage", "malformed"), ("html", "malformed")])
def test_servers_that_talk_nonsense(bench_server: Callable[[], str], model: str, kind: str) -> None:
    found = figures(measured(bench_server(), model).run, 1)
    assert (found["requests"], found["errors"]) == (0, {kind: 4})


def test_a_server_that_is_busy_is_asked_again(bench_server: Callable[[], str]) -> None:
    found = figures(measured(bench_server(), "busy", sessions=1, users=1).run, 1)
    assert (found["requests"], found["errors"], found["sessions_given_up"]) == (3, {"http 429": 3}, 0)


def test_what_can_not_be_measured_is_said(bench_server: Callable[[], str]) -> None:
    url = bench_server()
    with pytest.raises(ValueError, match="give --api-key"):
        measured(url, "", key="wrong")
    with pytest.raises(ValueError, match="no server answers"):
        measured("http://127.0.0.1:9/v1", "")
    with pytest.raises(ValueError, match="refused the first request: http 429: busy"):
        measured(url, "full")
    with pytest.raises(ValueError, match="no URL"):
        measured("127.0.0.1:8000", "")
    assert Target.of("https://example.org/v1/") == Target("example.org", 443, "/v1", True)


def test_a_client_that_is_the_bottleneck_is_warned_of() -> None:
    busy = Watch(lags=[0.0] * 99, cpu=0.9, wall=1.0).report()
    assert "90% of a core" in str(busy["warning"])
    late = Watch(lags=[0.0] * 50 + [0.05] * 50, cpu=0.1, wall=1.0).report()
    assert "50 ms late" in str(late["warning"])
    assert Watch(lags=[0.001] * 100, cpu=0.1, wall=1.0).report()["warning"] == ""


def test_a_loop_that_is_blocked_shows_as_late() -> None:
    async def blocked() -> Watch:
        async with watched(time.perf_counter) as watch:
            await asyncio.sleep(0)
            # The heartbeat is due in the middle of this.
            end = time.perf_counter() + 0.2
            while time.perf_counter() < end:
                pass
            deadline = time.perf_counter() + LIMIT_S
            while not watch.lags and time.perf_counter() < deadline:
                await asyncio.sleep(0.001)
        return watch

    assert max(asyncio.run(blocked()).lags) > 0.1
