"""The `anthropic` package as a client of the Messages API."""

import json
from collections.abc import Callable, Iterator

import anthropic
import pytest
from fake_core import DEFAULT_TEXT
from servers import Served, http, start_server, stop_server
from tiny_text import encode

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = (
    "<think>\nOslo, then Bergen.</think>\n\nLet me look."
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo {1,2"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
)


def script(**what: object) -> dict[str, str]:
    """The request's `metadata`, by which the fake engine learns what to say."""
    return {"user_id": json.dumps(what)}


@pytest.fixture(scope="module")
def hermes(tiny_model: object) -> Iterator[Served]:
    """A server whose model thinks and calls tools."""
    server = start_server(str(tiny_model), serve={"tool_parser": "hermes", "reasoning_parser": "qwen3"})
    yield server
    stop_server(server)


def client_of(server: Served, key: str = "any") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.root, api_key=key, max_retries=0)


@pytest.fixture
def client(hermes: Served) -> anthropic.Anthropic:
    return client_of(hermes)


def test_whole_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="fake", max_tokens=100, messages=HELLO, metadata=script(cached=7), system="Be brief."
    )
    assert [(block.type, block.text) for block in message.content] == [("text", DEFAULT_TEXT)]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.cache_read_input_tokens == 7
    counted = client.messages.count_tokens(model="fake", messages=HELLO, system="Be brief.").input_tokens
    assert message.usage.input_tokens + 7 == counted


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_a_stream_gives_the_whole_message_however_tokens_come(
    client: anthropic.Anthropic, chunk: int
) -> None:
    options = {"model": "fake", "max_tokens": 1000, "messages": HELLO, "tools": [WEATHER]}
    whole = client.messages.create(**options, metadata=script(text=CALLS, cached=3))
    with client.messages.stream(**options, metadata=script(text=CALLS, chunk=chunk, cached=3)) as stream:
        kinds = [event.type for event in stream if event.type.startswith(("message", "content"))]
        streamed = stream.get_final_message()

    def shape(message: anthropic.types.Message) -> list[dict[str, object]]:
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert shape(streamed) == shape(whole)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "Oslo, then Bergen."
    assert whole.content[0].signature
    assert [block.input for block in whole.content[2:]] == [{"city": "Oslo {1,2"}, {}]
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert streamed.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens == 3
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    assert (kinds[0], kinds[-2], kinds[-1]) == ("message_start", "message_delta", "message_stop")
    starts = [index for index, kind in enumerate(kinds) if kind == "content_block_start"]
    stops = [index for index, kind in enumerate(kinds) if kind == "content_block_stop"]
    assert all(start < stop for start, stop in zip(starts, stops, strict=True))
    assert all(stop < start for stop, start in zip(stops, starts[1:], strict=False))


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model="fake", max_tokens=100, messages=HELLO, stop_sequences=["世"], metadata=script()
    )
    assert message.content[0].text == DEFAULT_TEXT.split("世")[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "世")


def test_a_cut_answer_says_so_and_its_blocks_stay_readable(client: anthropic.Anthropic) -> None:
    cut = len(encode(CALLS[: CALLS.index("Oslo {")]))
    message = client.messages.create(
        model="fake", max_tokens=cut, messages=HELLO, tools=[WEATHER], metadata=script(text=CALLS)
    )
    assert message.stop_reason == "max_tokens"
    assert message.content[-1].type == "tool_use"
    assert isinstance(message.content[-1].input, dict)


def test_a_slow_prompt_is_bridged_by_pings(own_server: Callable[..., Served]) -> None:
    server = own_server(limits={"keepalive": 0.02})
    body = {
        "model": "fake",
        "max_tokens": 50,
        "messages": HELLO,
        "stream": True,
        "metadata": script(wait=200),
    }
    with http.stream("POST", f"{server.url}/messages", json=body) as reply:
        events = [line.removeprefix("event: ") for line in reply.iter_lines() if line.startswith("event: ")]
    assert events[0] == "ping"
    assert events[-1] == "message_stop"
    assert next(event for event in events if event != "ping") == "message_start"


def test_errors_have_the_apis_own_shape(own_server: Callable[..., Served]) -> None:
    server = own_server(api_keys=["secret"])
    with pytest.raises(anthropic.AuthenticationError) as refused:
        client_of(server, "wrong").messages.create(model="fake", max_tokens=1, messages=HELLO)
    assert refused.value.body["error"]["type"] == "authentication_error"
    client = client_of(server, "secret")
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=1, messages=HELLO)
    assert missing.value.body == {"type": "error", "error": missing.value.body["error"]}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0 .* reads text only"):
        client.messages.create(model="fake", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="fake", max_tokens=0, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences must"):
        client.messages.create(model="fake", max_tokens=1, messages=HELLO, stop_sequences=["x" * 2000])


def test_an_error_within_a_stream(client: anthropic.Anthropic) -> None:
    with (
        pytest.raises(anthropic.APIStatusError, match="no room"),
        client.messages.stream(
            model="fake", max_tokens=10, messages=HELLO, metadata=script(refuse="no room")
        ) as stream,
    ):
        stream.until_done()
