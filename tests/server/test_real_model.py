"""The small real model behind the real engine, through HTTP."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from servers import PATIENCE_S, Served, http, start_server, stop_server

pytest.importorskip("quickturn_control")
pytest.importorskip("quickturn_kernels")

QUESTIONS = [
    "What is the capital of France?",
    "Name three rivers.",
    "Write a short poem about the sea.",
    "Wie sagt man Danke auf Französisch? 🙂",
]
ENGINE = {"dtype": "float32", "memory": 512 << 20, "served_model_name": "small"}
RUNNING = "quickturn_engine_requests_running"


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    server = start_server("embedded", core="quickturn.engine.core:EngineCore", engine=ENGINE)
    yield server
    stop_server(server)


@pytest.fixture
async def client(real: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=real.url, api_key="any", max_retries=0, timeout=300) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, text: str, stream: bool = False, **fields: object) -> str:
    messages = [{"role": "user", "content": text}]
    fields = {"temperature": 0, "max_tokens": 24, **fields}
    answer = await client.chat.completions.create(model="small", messages=messages, stream=stream, **fields)
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])


async def test_sixteen_chats_at_once_answer_as_one_by_one(client: openai.AsyncOpenAI) -> None:
    alone = [await ask(client, question) for question in QUESTIONS]
    assert "Paris" in alone[0]
    together = await asyncio.gather(
        *(ask(client, QUESTIONS[index % 4], stream=index % 2 == 0) for index in range(16))
    )
    assert together == [alone[index % 4] for index in range(16)]


async def test_seed_and_stop(client: openai.AsyncOpenAI) -> None:
    drawn = [await ask(client, QUESTIONS[2], temperature=1.0, seed=7) for _ in range(2)]
    assert drawn[0] == drawn[1]
    whole = await ask(client, QUESTIONS[0])
    assert await ask(client, QUESTIONS[0], stop=["Paris"]) == whole.split("Paris")[0]


async def test_a_prompt_seen_before_is_not_computed_again(client: openai.AsyncOpenAI) -> None:
    messages = [{"role": "user", "content": "Remember these words: " + "alpha beta gamma delta " * 60}]
    cached = []
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="small", messages=messages, temperature=0, max_tokens=4
        )
        assert answer.usage is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] < 64
    assert cached[1] == (answer.usage.prompt_tokens - 1) // 64 * 64


async def test_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": QUESTIONS[0]}],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content + "<|im_end|>"
    for entry in choice.logprobs.content:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.token == entry.top_logprobs[0].token


async def test_a_client_that_leaves_frees_its_blocks(client: openai.AsyncOpenAI, real: Served) -> None:
    stream = await client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": QUESTIONS[2]}],
        stream=True,
        max_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await asyncio.to_thread(real.wait_for, lambda stats: stats[RUNNING] == 0)


async def test_killed_engine() -> None:
    server = start_server("embedded", core="quickturn.engine.core:EngineCore", engine=ENGINE)
    try:
        client = openai.AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0, timeout=300)
        fields = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
        tasks = [
            asyncio.create_task(ask(client, QUESTIONS[0], stream=i % 2 == 0, **fields)) for i in range(4)
        ]
        await asyncio.to_thread(server.wait_for, lambda stats: stats[RUNNING] == 4)
        os.kill(server.engine_pid(), signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), PATIENCE_S)
        assert all(isinstance(error, openai.APIError) and "SIGKILL" in str(error) for error in errors)
        await client.close()
        assert http.get(f"{server.root}/health").status_code == 503
    finally:
        stop_server(server)
