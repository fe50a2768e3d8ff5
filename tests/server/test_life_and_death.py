"""Clients that go away, engines that die, servers that are told to leave."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import PATIENCE_S, Served, http

from quickturn.config import EngineConfig
from quickturn.engine.client import EngineClient
from quickturn.engine.messages import LoadProgress
from quickturn.engine.stream import EngineDied
from quickturn.sampling_params import SamplingParams
from quickturn.text.tokenizer import pack_tokens

RUNNING = "quickturn_engine_running"
CANCELLED = "quickturn_engine_cancelled_total"
STEPS = "quickturn_engine_steps_total"


def body(stream: bool = False, n: int = 1, **what: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"messages": messages, "stream": stream, "n": n, "prompt_cache_key": json.dumps(what)}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_frees_within_a_step(served: Served, stream: bool, n: int) -> None:
    before = served.stats()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        what = body(stream, n, endless=True, wait=0 if stream else 1 << 40)
        task = asyncio.create_task(_read_some(client, served, what, stream))
        if stream:
            await task
        else:
            await asyncio.to_thread(served.wait_for, lambda stats: stats[RUNNING] == n)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        after = await asyncio.to_thread(
            served.wait_for, lambda stats: stats[RUNNING] == 0 and stats["quickturn_http_active"] == 0
        )
    assert after[CANCELLED] == before[CANCELLED] + n


async def _read_some(client: httpx.AsyncClient, served: Served, what: dict[str, Any], stream: bool) -> None:
    url = f"{served.url}/chat/completions"
    if not stream:
        await client.post(url, json=what)
        return
    async with client.stream("POST", url, json=what) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:") and "content" in line:
                break


def test_keepalive_while_the_first_token_is_far(own_server: Callable[..., Served], tmp_path: Path) -> None:
    server, far = own_server(limits={"keepalive": 0.05}), tmp_path / "far"
    what = body(stream=True, until=str(far))
    lines: list[str] = []
    with http.stream("POST", f"{server.url}/chat/completions", json=what) as response:
        for line in response.iter_lines():
            lines.append(line)
            if lines.count(": keep-alive") == 2:
                far.touch()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert "Grüße" not in "".join(lines[: lines.index(": keep-alive")])


@pytest.mark.parametrize("how", ["kill", "crash"])
async def test_engine_death_ends_every_request(own_server: Callable[..., Served], how: str) -> None:
    server = own_server()
    url = f"{server.url}/chat/completions"
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        streams = [client.post(url, json=body(stream=True, endless=True, wait=5)) for _ in range(4)]
        wholes = [client.post(url, json=body(wait=1 << 40)) for _ in range(4)]
        tasks = [asyncio.create_task(call) for call in streams + wholes]
        await asyncio.to_thread(server.wait_for, lambda stats: stats[RUNNING] == 8)
        if how == "kill":
            os.kill(server.engine_pid(), signal.SIGKILL)
        else:
            await client.post(url, json=body(crash=True))
        answers = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
        health = await client.get(f"{server.root}/health")
        refused = await client.post(url, json=body())
    expected = "SIGKILL" if how == "kill" else "scripted crash"
    for answer in answers[:4]:
        last = answer.text.strip().split("\n\n")[-1]
        assert expected in json.loads(last.removeprefix("data: "))["error"]["message"]
    for answer in [*answers[4:], refused]:
        assert answer.status_code == 503
        assert expected in answer.json()["error"]["message"]
    assert health.status_code == 503
    assert expected in health.json()["message"]


def test_engine_dies_with_its_server(own_server: Callable[..., Served]) -> None:
    server = own_server()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while _alive(engine):
        assert time.monotonic() < deadline, "the engine outlived its server"
        time.sleep(0.005)


async def test_sigterm_drains(own_server: Callable[..., Served], tmp_path: Path) -> None:
    server, asked = own_server(shutdown_timeout=PATIENCE_S), tmp_path / "asked"
    url = f"{server.url}/chat/completions"
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        running = asyncio.create_task(client.post(url, json=body(stream=True, until=str(asked))))
        await asyncio.to_thread(server.wait_for, lambda stats: stats[RUNNING] == 1)
        server.process.send_signal(signal.SIGTERM)
        await _draining(client, server)
        assert (await client.get(f"{server.root}/health/live")).status_code == 200
        refused = await client.post(url, json=body())
        asked.touch()
        answer = await running
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert answer.text.endswith("data: [DONE]\n\n")
    assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0


async def _draining(client: httpx.AsyncClient, server: Served) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await client.get(f"{server.root}/health")).status_code != 503:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["timeout", "second signal"])
async def test_drain_is_bounded(own_server: Callable[..., Served], how: str) -> None:
    server = own_server(shutdown_timeout=0.3 if how == "timeout" else 600)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        call = client.post(
            f"{server.url}/chat/completions", json=body(stream=True, endless=True, wait=1 << 40)
        )
        running = asyncio.create_task(call)
        await asyncio.to_thread(server.wait_for, lambda stats: stats[RUNNING] == 1)
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            await _draining(client, server)
            server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, PATIENCE_S) == 0
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from servers import HERE

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("child_path")
@pytest.mark.parametrize(
    ("name", "message"), [("broken", "choose another --model"), ("vanishes", "exit status 7")]
)
async def test_start_failure_is_the_engines_own_message(name: str, message: str) -> None:
    engine = EngineClient(EngineConfig("x", served_model_name=name), "fake_core:FakeCore", "CRITICAL")
    with pytest.raises(EngineDied, match=message):
        await engine.start()
    assert not _alive(engine.pid)


@pytest.mark.usefixtures("child_path")
async def test_client_alone() -> None:
    reports: list[LoadProgress] = []
    engine = EngineClient(EngineConfig("x"), "fake_core:FakeCore", "CRITICAL")
    ready = await engine.start(reports.append)
    assert ready.facts == {"core": "fake"}
    assert [report.done for report in reports] == [1, 2]
    stream = engine.submit(pack_tokens([1, 2, 3]), SamplingParams(max_tokens=5))
    outputs = [output async for output in stream]
    assert sum(len(output.tokens) for output in outputs) == 5
    assert outputs[-1].finish == "length"
    stats = await engine.stats()
    assert stats.values["finished_total"] == 1
    open_stream = engine.submit(pack_tokens([1]), SamplingParams(max_tokens=5), session='{"wait": 1000000}')
    folder = engine._folder
    await engine.close()
    with pytest.raises(EngineDied, match="shut down"):
        await anext(open_stream)
    assert not _alive(engine.pid)
    assert not folder.exists()


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
