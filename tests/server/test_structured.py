"""Structured output and forced calls: the small real model behind the real engine, through HTTP."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from servers import Served, start_server, stop_server

pytest.importorskip("quickturn_control")
pytest.importorskip("quickturn_kernels")
pytest.importorskip("xgrammar")

ENGINE = {"dtype": "float32", "memory": 256 << 20, "served_model_name": "small", "max_requests": 16}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city", "unit"],
}
PING = {"type": "function", "function": {"name": "ping"}}


def tool(strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": strict}}


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    server = start_server(
        "embedded", core="quickturn.engine.core:EngineCore", engine=ENGINE, serve={"tool_parser": "hermes"}
    )
    yield server
    stop_server(server)


@pytest.fixture
async def client(real: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=real.url, api_key="any", max_retries=0, timeout=300) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    fields = {"temperature": 1.0, "seed": 3, "max_tokens": 200, **fields}
    return await client.chat.completions.create(model="small", messages=messages, **fields)


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def is_weather(value: Any) -> bool:
    days = value.get("days", 1)
    good = set(value) <= {"city", "unit", "days"} and value["unit"] in "CF" and 1 <= days <= 5
    return good and len(value["city"]) <= 12


async def test_formats_side_by_side_with_a_free_answer(client: openai.AsyncOpenAI) -> None:
    free = {"temperature": 0, "max_tokens": 12}
    alone = (await ask(client, "Name three rivers.", **free)).choices[0].message.content
    answers = await asyncio.gather(
        ask(client, "The weather in Oslo?", response_format=response_format(WEATHER)),
        ask(client, "Name three rivers.", **free),
        ask(client, "Yes or no?", extra_body={"guided_choice": ["yes", "no"]}),
        ask(client, "A date?", extra_body={"guided_regex": "[0-9]{4}-[0-9]{2}"}),
        ask(client, "Sum?", extra_body={"guided_grammar": 'root ::= term (" + " term){1,2}\nterm ::= [0-9]'}),
    )
    weather, rivers, choice, date, total = [answer.choices[0].message.content for answer in answers]
    assert is_weather(json.loads(weather))
    assert rivers == alone
    assert choice in ("yes", "no")
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", date)
    assert re.fullmatch(r"[0-9]( \+ [0-9]){1,2}", total)
    assert answers[0].choices[0].finish_reason == "stop"


async def test_a_streamed_object_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    fields = {"response_format": response_format(WEATHER), "seed": 11}
    whole = (await ask(client, "Bergen?", **fields)).choices[0].message.content
    events = await ask(client, "Bergen?", stream=True, **fields)
    assert "".join([event.choices[0].delta.content or "" async for event in events]) == whole


@pytest.mark.parametrize("strict", [True, False])
async def test_a_call_can_be_required(client: openai.AsyncOpenAI, strict: bool) -> None:
    fields = {"tools": [tool(strict), PING], "tool_choice": "required", "parallel_tool_calls": False}
    choice = (await ask(client, "The weather in Oslo?", **fields)).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 1
    call = choice.message.tool_calls[0].function
    value = json.loads(call.arguments)
    assert value == {} if call.name == "ping" else is_weather(value)


async def test_a_call_can_be_named(client: openai.AsyncOpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    fields = {"tools": [PING, tool()], "tool_choice": named, "stream": True}
    name, arguments, finish = "", "", None
    async for event in await ask(client, "Hello", **fields):
        choice = event.choices[0]
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, finish) == ("weather", "tool_calls")
    assert is_weather(json.loads(arguments))


async def test_completions_follow_formats_too(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="small", prompt="x", max_tokens=50, extra_body={"guided_regex": "a{3}"}
    )
    assert answer.choices[0].text == "aaa"


async def test_a_bad_grammar_has_a_status_even_in_a_stream(client: openai.AsyncOpenAI) -> None:
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError, match="not closed"):
            await ask(client, "x", stream=stream, extra_body={"guided_regex": "(a"})
