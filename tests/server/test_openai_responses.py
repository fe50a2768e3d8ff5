"""The `openai` package as a client of the Responses API."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from fake_core import DEFAULT_TEXT
from servers import Served, start_server, stop_server

from quickturn.server.errors import ApiError
from quickturn.server.responses_items import chat_messages
from quickturn.server.responses_store import ResponseStore, StoredResponse

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLS = (
    "<think>\nOslo, then Bergen.</think>\n\nLet me look."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {1,2"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)

PARSED = {"content": {"__all__": {"parsed"}}, "parsed_arguments": True}
"""What the client package adds to items by itself."""


def script(**what: object) -> str:
    """The request's `prompt_cache_key`, by which the fake engine learns what to say."""
    return json.dumps(what)


@pytest.fixture(scope="module")
def hermes(tiny_model: object) -> Iterator[Served]:
    """A server whose model thinks and calls tools."""
    server = start_server(str(tiny_model), serve={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    yield server
    stop_server(server)


@pytest.fixture
def client(hermes: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=hermes.url, api_key="any", max_retries=0)


def test_whole_response(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="fake", input="Hello", instructions="Be brief.", prompt_cache_key=script(cached=7)
    )
    assert response.output_text == DEFAULT_TEXT
    assert (response.status, response.instructions, response.error) == ("completed", "Be brief.", None)
    assert response.usage.input_tokens_details.cached_tokens == 7
    assert response.usage.output_tokens == len(DEFAULT_TEXT.encode()) + 1


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_events_come_in_order_and_build_the_final_object(client: openai.OpenAI, chunk: int) -> None:
    tools = [WEATHER, {"type": "web_search"}]
    with client.responses.stream(
        model="fake", input="Hello", tools=tools, prompt_cache_key=script(text=CALLS, chunk=chunk)
    ) as stream:
        events = list(stream)
    final = events[-1].response
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    thinking, message, first, second = final.output
    assert thinking.content[0].text == "Oslo, then Bergen."
    assert message.content[0].text == "Let me look."
    assert (json.loads(first.arguments), json.loads(second.arguments)) == ({"city": "Oslo {1,2"}, {})
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert (mine[0].type, mine[-1].type) == ("response.output_item.added", "response.output_item.done")
        assert mine[-1].item.model_dump(exclude=PARSED) == item.model_dump(exclude=PARSED)
        assert {getattr(event, "item_id", item.id) for event in mine} == {item.id}
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    counted = final.usage.output_tokens_details.reasoning_tokens
    assert 0 < counted < final.usage.output_tokens or chunk > 1


def test_a_response_goes_on_from_an_earlier_one(client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="fake", input="Weather?", tools=[WEATHER], prompt_cache_key=script(text=CALLS)
    )
    call = first.output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = client.responses.create(model="fake", input=[result], previous_response_id=first.id)
    question = {"role": "user", "content": "Weather?"}
    whole = [question, *(item.model_dump() for item in first.output), result]
    repeated = client.responses.create(model="fake", input=whole)
    alone = client.responses.create(model="fake", input=[question])
    assert second.usage.input_tokens == repeated.usage.input_tokens > alone.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["function_call_output"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError, match="send the whole conversation"):
        client.responses.create(model="fake", input="go on", previous_response_id=second.id)
    unkept = client.responses.create(model="fake", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_cut_response_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="fake", input="Hello", max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


def test_a_stream_that_fails_says_so(client: openai.OpenAI) -> None:
    events = list(
        client.responses.create(
            model="fake", input="Hello", stream=True, prompt_cache_key=script(refuse="no room")
        )
    )
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "no room"


def test_log_probabilities_follow_their_text(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="fake", input="Hello", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    part = response.output[0].content[0]
    assert "".join(entry.token for entry in part.logprobs[:2]) == DEFAULT_TEXT[:2]
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_responses_belong_to_the_key_that_made_them(own_server: Callable[..., Served]) -> None:
    server = own_server(api_keys=["mine", "yours"])
    clients = {
        key: openai.OpenAI(base_url=server.url, api_key=key, max_retries=0) for key in ("mine", "yours")
    }
    made = clients["mine"].responses.create(model="fake", input="Hello")
    assert clients["mine"].responses.retrieve(made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        clients["yours"].responses.retrieve(made.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (
            {"input": "x", "tool_choice": {"type": "function", "name": "other"}, "tools": [WEATHER]},
            "tool_choice",
        ),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
    ],
)
def test_what_cannot_be_done_is_named(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", **fields)
    assert refused.value.param == param


def test_items_become_messages_in_their_place() -> None:
    items = [
        {"role": "user", "content": "go"},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r1"}],
        },
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "r2"}]},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "one"}]},
        {"type": "function_call_output", "call_id": "b", "output": "two"},
        {"role": "developer", "content": "in French"},
    ]

    def called(id: str, name: str, arguments: str) -> list[dict[str, Any]]:
        return [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]

    assert chat_messages("Be brief.", items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "reasoning_content": "r1", "tool_calls": called("a", "f", "{}")},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "r2",
            "tool_calls": called("b", "g", '{"x": 1}'),
        },
        {"role": "tool", "tool_call_id": "a", "name": "f", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "name": "g", "content": "two"},
        {"role": "developer", "content": "in French"},
    ]


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    def stored(size: int) -> StoredResponse:
        return StoredResponse("", {"id": size}, [], [], size)

    store = ResponseStore(responses=3, bytes=100)
    for id in "abc":
        store.put(id, stored(10))
    store.get("a", "")
    store.put("d", stored(10))
    with pytest.raises(ApiError):
        store.get("b", "")
    store.put("e", stored(75))
    with pytest.raises(ApiError):
        store.get("c", "")
    assert store.get("a", "").size == 10
    with pytest.raises(ApiError):
        store.get("a", "another key")
