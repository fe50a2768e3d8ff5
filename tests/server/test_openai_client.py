"""The `openai` package as a client."""

import asyncio
import json
from collections.abc import Callable

import openai
import pytest
from fake_core import DEFAULT_TEXT
from servers import Served

HELLO = [{"role": "user", "content": "Hello"}]


def script(**what: object) -> dict[str, str]:
    return {"prompt_cache_key": json.dumps(what)}


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="any", max_retries=0)


def test_whole_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, extra_body=script(cached=7))
    assert answer.choices[0].message.content == DEFAULT_TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 24
    assert answer.usage.completion_tokens == len(DEFAULT_TEXT.encode()) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 7


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_streamed_chat_is_the_whole_one_however_tokens_come(client: openai.OpenAI, chunk: int) -> None:
    events = client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, extra_body=script(chunk=chunk)
    )
    chunks = list(events)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == DEFAULT_TEXT
    assert not any("\ufffd" in text for text in texts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_usage_chunk(client: openai.OpenAI) -> None:
    events = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=script(cached=9),
    )
    *before, last = list(events)
    assert last.choices == []
    assert last.usage.prompt_tokens_details.cached_tokens == 9
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(chunk.usage is None and chunk.choices for chunk in before)


def test_no_usage_unless_asked_for(client: openai.OpenAI) -> None:
    events = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in events)


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, n=3, stream=stream, max_tokens=9, extra_body=script(text="abcdefghijk")
    )
    texts = ["", "", ""]
    reasons: list[str | None] = [None] * 3
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == ["abcdefghi"] * 3
    assert reasons == ["length"] * 3


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_never_shows(client: openai.OpenAI, served: Served, stream: bool, chunk: int) -> None:
    stopped = served.stats()["quickturn_engine_stopped_total"]
    answer = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        stop=["GHI", "zzz"],
        stream=stream,
        extra_body=script(text="ABCDEFGHIJKL" * 50, chunk=chunk, endless=True),
    )
    parts = list(answer) if stream else [answer]
    text = "".join(
        (part.choices[0].delta if stream else part.choices[0].message).content or "" for part in parts
    )
    assert text == "ABCDEF"
    assert parts[-1].choices[0].finish_reason == "stop"
    served.wait_for(lambda stats: stats["quickturn_engine_stopped_total"] == stopped + 1)


def test_held_back_tail_comes_at_the_end(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, stop=["END"], extra_body=script(text="to the EN")
    )
    assert answer.choices[0].message.content == "to the EN"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=2, extra_body=script(text="é!")
    )
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9], [0x21], list(b"<|im_end|>")]
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_completion_with_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["a", "b"], n=2, max_tokens=4, logprobs=1, extra_body=script(text="wxyz!")
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["wxyz"] * 4
    assert answer.choices[0].logprobs.tokens == ["w", "x", "y", "z"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 2


def test_completion_of_token_ids_streamed(client: openai.OpenAI) -> None:
    events = list(
        client.completions.create(
            model="fake", prompt=[72, 105], stream=True, max_tokens=100, extra_body=script(chunk=4)
        )
    )
    assert "".join(event.choices[0].text for event in events) == DEFAULT_TEXT
    assert events[-1].choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == "fake"
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


async def test_sixteen_chats_at_once(served: Served) -> None:
    client = openai.AsyncOpenAI(base_url=served.url, api_key="any", max_retries=0)

    async def chat(number: int) -> str:
        body = script(text=f"{number} Größe 🙂 " * (number + 1), chunk=number % 5 + 1)
        events = await client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, extra_body=body
        )
        return "".join([event.choices[0].delta.content or "" async for event in events])

    answers = await asyncio.gather(*(chat(number) for number in range(16)))
    assert answers == [f"{number} Größe 🙂 " * (number + 1) for number in range(16)]
    await client.close()


def test_answers_are_in_the_metrics(own_server: Callable[..., Served]) -> None:
    served = own_server()
    with openai.OpenAI(base_url=served.url, api_key="any", max_retries=0) as client:
        client.chat.completions.create(model="fake", messages=HELLO, extra_body=script(text="abcdef"))
    figures = served.stats()
    assert figures["quickturn_generated_tokens_total"] == 7
    gaps = [figures[f'quickturn_time_between_tokens_seconds_bucket{{le="{le}"}}'] for le in ("0.5", "+Inf")]
    assert 0 < gaps[0] <= gaps[1] == figures["quickturn_time_between_tokens_seconds_count"] <= 6
