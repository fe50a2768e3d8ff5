"""Long texts are never read on the event loop's thread, and hold up no stream: a server within this process,
so that its threads can be watched and stopped.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from servers import HERE

from quickturn.config import EngineConfig
from quickturn.server import body as body_module
from quickturn.server.app import build_app
from quickturn.server.off_loop import OFF_LOOP_BYTES
from quickturn.server.serving import ServeConfig, start_state
from quickturn.text.chat_template import ChatTemplate
from quickturn.text.encoder import Encoder
from quickturn.text.tokenizer import Tokenizer

LONG = "word " * OFF_LOOP_BYTES
PATIENCE_S = 60


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = EngineConfig(str(model), served_model_name="fake", max_context=1 << 20)
    state = await start_state(config, ServeConfig(core="fake_core:FakeCore", log_level="critical"))
    try:
        transport = httpx.ASGITransport(build_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=PATIENCE_S) as client:
            yield client
    finally:
        await state.engine.close()


@pytest.fixture(autouse=True)
def fake_core_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


class Watch:
    """Which threads ran the watched functions, by their names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[str, set[int]] = {}
        self._monkeypatch = monkeypatch

    def watch(self, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return real(*arguments, **options)

        self._monkeypatch.setattr(owner, name, watched)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses": {"input": [{"role": "user", "content": LONG}]},
    "/v1/messages": {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": LONG}]},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [{"role": "user", "content": LONG}]},
    "/v1/completions": {"prompt": LONG},
    "/tokenize": {"prompt": LONG},
}


async def test_long_bodies_are_read_in_other_threads(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    for owner, name in (
        (Encoder, "encode"),
        (Tokenizer, "_ids"),
        (Tokenizer, "mark_data"),
        (ChatTemplate, "render"),
    ):
        watch.watch(owner, name)
    decode: Callable[..., Any] = body_module.read_body

    class Decoder:
        """A decoder that says where it runs: those of msgspec can't be watched themselves."""

        def __init__(self, real: "msgspec.json.Decoder[Any]") -> None:
            self._real = real

        def decode(self, data: bytes) -> Any:
            watch.threads.setdefault("decode", set()).add(threading.get_ident())
            return self._real.decode(data)

    for module in ("openai_chat", "openai_responses", "openai_completions"):
        monkeypatch.setattr(
            f"quickturn.server.{module}.read_body",
            lambda request, decoder, state: decode(request, Decoder(decoder), state),
        )
    async with served(tiny_model) as client:
        watch.threads.clear()
        for path, body in BODIES.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        loop = threading.get_ident()
        assert set(watch.threads) == {"encode", "_ids", "mark_data", "render", "decode"}
        assert all(loop not in threads for threads in watch.threads.values()), watch.threads


async def test_streams_go_on_while_a_long_prompt_is_tokenised(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than there are threads are held until another's whole stream is there."""
    entered, released = threading.Event(), threading.Event()
    real = Encoder.encode

    def held(self: Encoder, parts: Any, *rest: Any) -> Any:
        if sum(len(part) for part in parts) > OFF_LOOP_BYTES:
            entered.set()
            assert released.wait(PATIENCE_S)
        return real(self, parts, *rest)

    monkeypatch.setattr(Encoder, "encode", held)
    async with served(tiny_model) as client:
        path = "/v1/chat/completions"
        long = [asyncio.create_task(client.post(path, json=BODIES[path])) for _ in range(8)]
        try:
            assert await asyncio.to_thread(entered.wait, PATIENCE_S)
            text = "a stream of tokens"
            script = json.dumps({"text": text})
            short = {"messages": [{"role": "user", "content": "x"}], "prompt_cache_key": script}
            answer = await client.post(path, json={**short, "stream": True})
            # Outputs that wait for one another are joined: how many events there are depends on the machine.
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
            assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == text
            assert answer.text.endswith("data: [DONE]\n\n")
            assert not any(task.done() for task in long)
        finally:
            released.set()
        assert [answer.status_code for answer in await asyncio.gather(*long)] == [200] * 8
