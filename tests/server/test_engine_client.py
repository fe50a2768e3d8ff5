"""The client of an engine process under readers that don't read, storms of cancels, and starts that fail."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import HERE, PATIENCE_S, Served

from quickturn.config import EngineConfig
from quickturn.engine import client as client_module
from quickturn.engine.client import EngineClient
from quickturn.engine.messages import TokenLogprobs, TokenOutput
from quickturn.engine.stream import EngineDied, RequestStream
from quickturn.sampling_params import SamplingParams
from quickturn.text.tokenizer import pack_tokens


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for sockets, so that a test sees what is left; and the fake core within reach."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def client(**config: Any) -> EngineClient:
    return EngineClient(EngineConfig("x", **config), "fake_core:FakeCore", "CRITICAL")


@asynccontextmanager
async def started() -> AsyncIterator[EngineClient]:
    engine = client()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def endless(engine: EngineClient, max_tokens: int = 1 << 30) -> RequestStream:
    return engine.submit(
        pack_tokens([1]), SamplingParams(max_tokens=max_tokens), session='{"endless": true, "chunk": 7}'
    )


async def read_all(stream: RequestStream) -> list[TokenOutput]:
    return [output async for output in stream]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def test_a_reader_that_stays_away_gets_one_output(places: Path) -> None:
    async with started() as engine:
        unread, read = endless(engine, 500), endless(engine, 500)
        outputs = await read_all(read)
        await until(lambda: unread.ended)
        joined = await read_all(unread)
        # How many outputs the reader got depends on the machine.
        assert len(joined) == 1
        assert joined[0].tokens == [token for output in outputs for token in output.tokens]
        assert (joined[0].finish, joined[0].cached_tokens) == ("length", 0)


async def test_joined_outputs_keep_what_the_first_said_and_how_the_last_ended() -> None:
    stream = RequestStream(lambda id, finished: None, 1)
    stream.put(TokenOutput(1, [1], cached_tokens=5, logprobs=[TokenLogprobs(-1.0, [])]))
    stream.put(TokenOutput(1, [2, 3], logprobs=[TokenLogprobs(-2.0, []), TokenLogprobs(-3.0, [])]))
    stream.put(TokenOutput(1, [], "error", error="why"))
    first, last = await read_all(stream)
    assert (first.tokens, first.finish, first.cached_tokens) == ([1, 2, 3], "", 5)
    assert [entry.logprob for entry in first.logprobs or ()] == [-1.0, -2.0, -3.0]
    assert (last.finish, last.error) == ("error", "why")


async def test_a_storm_of_cancels_leaves_nothing() -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with started() as engine:
        streams: list[RequestStream] = []
        for _ in range(3000):
            streams.append(endless(engine))
            if rng.random() < 0.9:
                streams.pop(rng.randrange(len(streams))).cancel(finished=rng.random() < 0.5)
            if rng.random() < 0.05:
                await asyncio.sleep(0)
        for stream in streams:
            stream.cancel()
            stream.cancel()
        values = (await engine.stats(PATIENCE_S)).values
        assert engine.open_requests == values["running"] == 0
        assert values["added_total"] == values["cancelled_total"] + values["stopped_total"] == 3000


async def test_a_prompt_of_many_megabytes_arrives() -> None:
    async with started() as engine:
        stream = engine.submit(bytes(64 << 20), SamplingParams(max_tokens=1))
        assert [output.finish for output in await read_all(stream)] == ["length"]


async def test_stats_of_a_stuck_engine_pile_nothing_up() -> None:
    async with started() as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            for _ in range(5):
                await engine.stats(0.01)
            assert engine._stats_waiters == []
            assert engine.silent_for > 0
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: engine.silent_for == 0)


async def test_a_progress_display_that_fails_fails_the_start(places: Path) -> None:
    def broken(_: object) -> None:
        raise BrokenPipeError("nobody looks")

    engine = client()
    with pytest.raises(EngineDied, match="nobody looks"):
        await engine.start(broken)
    assert list(places.iterdir()) == []


async def test_no_process_leaves_nothing(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        await client().start()
    assert list(places.iterdir()) == []


async def test_a_process_that_ends_at_once_is_reaped(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    engine = client()
    with pytest.raises(EngineDied, match="exit status 1"):
        await engine.start()
    assert engine._process is not None
    assert engine._process.returncode == 1
    assert list(places.iterdir()) == []


async def test_a_socket_path_that_is_too_long_is_explained(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (places / ("x" * 120)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(places / ("x" * 120)))
    with pytest.raises(OSError, match="TMPDIR"):
        await client().start()


async def test_whoever_closes_second_waits_too(places: Path) -> None:
    engine = client()
    await engine.start()
    first = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    await engine.close()
    assert list(places.iterdir()) == []
    await first
    await engine.close()


async def test_death_by_lack_of_memory_says_what_to_change() -> None:
    async with started() as engine:
        stream = endless(engine)
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match=r"SIGKILL.*--memory"):
            await read_all(stream)


async def test_a_killed_server_leaves_no_socket(
    own_server: Callable[..., Served], places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(places))
    server = own_server()
    assert len(list(places.glob("quickturn-*/engine"))) == 1
    server.process.kill()
    server.process.wait()
    await until(lambda: not list(places.glob("quickturn-*")))


def test_how_the_engine_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def record(command: list[str], **options: Any) -> None:
        seen.append(options["env"])
        raise OSError("enough")

    monkeypatch.setattr(client_module.subprocess, "Popen", record)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    for settings in ({}, {"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "7"}):
        with monkeypatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            with pytest.raises(OSError, match="enough"):
                asyncio.run(client().start())
    assert int(seen[0]["GOMP_SPINCOUNT"]) > 0
    assert "GOMP_SPINCOUNT" not in seen[1]
    assert seen[2]["GOMP_SPINCOUNT"] == "7"
