"""Servers over two ranks: real processes, which answer as one does, and of which none outlives another."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from free_port import free_port
from servers import Served, start_server, stop_server
from tiny import random_checkpoint
from tiny_text import write_tiny_text
from transformers import PreTrainedModel

SECONDS = 120.0
"""Longest wait on a busy machine; a quiet one needs two or three."""
VOCAB = 264
LETTERS = range(ord("a"), ord("z") + 1)
ONLY_LETTERS = {str(token): -100 for token in range(VOCAB) if token not in LETTERS}
TIE = 1e-4
"""Logits whose sums were added up in another order differ by less."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "memory": 4 << 20,
    "block_tokens": 16,
    "max_requests": 16,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return random_checkpoint("llama", {"vocab_size": VOCAB, "max_position_embeddings": 1024})


@pytest.fixture(scope="module")
def model(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "tiny"
    reference.save_pretrained(path)
    return write_tiny_text(path)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """Two ranks that share every layer; the last test of this module ends one of them."""
    engine = {"served_model_name": "tiny", "tp": 2, **OPTIONS}
    server = start_server(model, core="quickturn.engine.core:EngineCore", engine=engine)
    yield server
    stop_server(server)


@torch.inference_mode()
def assert_likeliest_letters(model: PreTrainedModel, prompt: list[int], text: str) -> None:
    """Each character is the likeliest letter behind the ones before it, or as likely within `TIE`."""
    tokens = list(text.encode())
    assert all(token in LETTERS for token in tokens), text
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    letters = logits[:, LETTERS.start : LETTERS.stop]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float((letters.max(1).values - chosen).max()) <= TIE


def prompt_of(index: int) -> list[int]:
    return [97 + (7 * index + 3 * place * place) % 26 for place in range(20 + 5 * index)]


def completion(index: int, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt_of(index), "temperature": 0, "logit_bias": ONLY_LETTERS}
    return {"model": "tiny", "max_tokens": 24, **body, **options}


async def test_many_at_once_get_the_models_own_answers(served: Served, reference: PreTrainedModel) -> None:
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        calls = [client.post(f"{served.url}/completions", json=completion(index)) for index in range(10)]
        answers = await asyncio.gather(*calls)
        again = await client.post(f"{served.url}/completions", json=completion(9))
    for index, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert len(text) == 24
        assert_likeliest_letters(reference, prompt_of(index), text)
    usage = again.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == len(prompt_of(9)) // 16 * 16


async def test_structured_output(served: Served) -> None:
    """Every rank applies the same grammar; others run beside it."""
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["tree", "stone"]}, "old": {"type": "boolean"}},
        "required": ["kind", "old"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    body = {"messages": [{"role": "user", "content": "A thing?"}], "max_tokens": 200, "response_format": form}
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        forms = [
            client.post(f"{served.url}/chat/completions", json={**body, "seed": index}) for index in range(4)
        ]
        plain = client.post(f"{served.url}/completions", json=completion(3, max_tokens=100))
        *answers, beside = await asyncio.gather(*forms, plain)
    for answer in answers:
        assert answer.status_code == 200, answer.text
        thing = json.loads(answer.json()["choices"][0]["message"]["content"])
        assert set(thing) == {"kind", "old"}
    assert len(beside.json()["choices"][0]["text"]) == 100


async def test_a_client_that_goes_away_frees_its_cache(served: Served) -> None:
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        body = completion(1, max_tokens=900, stream=True)
        async with client.stream("POST", f"{served.url}/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    break
    await asyncio.to_thread(
        served.wait_for, lambda stats: stats["quickturn_engine_requests_running"] == 0, SECONDS
    )


async def test_a_killed_rank_ends_every_stream_and_the_server(served: Served) -> None:
    leader = served.engine_pid()
    (rank,) = children_of(leader)
    async with httpx.AsyncClient(timeout=SECONDS) as client:
        started = [asyncio.Event() for _ in range(6)]
        readers = [asyncio.create_task(read(client, served, index, started[index])) for index in range(6)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), SECONDS)
        os.kill(rank, signal.SIGKILL)
        for last in await asyncio.wait_for(asyncio.gather(*readers), SECONDS):
            assert "rank 1" in last["error"]["message"]
            assert "SIGKILL" in last["error"]["message"]
    assert await asyncio.to_thread(served.process.wait, SECONDS) == 1
    wait_until_gone(leader, rank)


async def read(client: httpx.AsyncClient, served: Served, index: int, started: asyncio.Event) -> Any:
    """The last event of a stream that would be long."""
    body = completion(index, max_tokens=900, stream=True)
    last = ""
    async with client.stream("POST", f"{served.url}/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                last = line.removeprefix("data:")
                started.set()
    return json.loads(last)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"processes {left} outlived the others"


def test_processes_of_a_launcher_find_each_other(model: Path, reference: PreTrainedModel) -> None:
    """As torchrun starts them: the first one serves, and the others end when it is killed."""
    port = free_port()
    processes = [launched(model, rank, port) for rank in range(2)]
    try:
        assert processes[0].stderr is not None
        lines = []
        for line in processes[0].stderr:
            lines.append(line)
            if line.startswith("serving at "):
                break
        else:
            raise AssertionError(f"it never served: {lines}")
        url = lines[-1].split()[-1]
        for index in range(3):
            answer = httpx.post(f"{url}/completions", json=completion(index), timeout=SECONDS)
            assert_likeliest_letters(reference, prompt_of(index), answer.json()["choices"][0]["text"])
        (leader,) = children_of(processes[0].pid)
        processes[0].kill()
        assert processes[1].wait(SECONDS) == 1
        wait_until_gone(leader)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def launched(model: Path, rank: int, port: int) -> "subprocess.Popen[str]":
    options = ["--dp", "2", "--dense-tp", "2", "--dtype", "float32", "--device", "cpu", "--memory", "4MiB"]
    names = ["--served-model-name", "tiny", "--port", "0"]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in place.items()},
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "quickturn", "serve", str(model), *options, *names],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
