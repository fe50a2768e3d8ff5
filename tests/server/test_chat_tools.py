"""Tools and thinking over the chat API, with the `openai` package as the client."""

import json
from typing import Any

import openai
import pytest
from servers import Served

HELLO = [{"role": "user", "content": "Hello"}]
SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
CALLS = (
    '<think>\nI look first.\n</think>\n\nOne moment.\n<tool_call>\n{"name": "shell", "arguments": '
    '{"command": "mkdir -p a/{b1,b2"}}\n</tool_call>\n<tool_call>\n{"name": "ping"}\n</tool_call>'
)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="any", max_retries=0)


def ask(client: openai.OpenAI, answer: dict[str, Any], **fields: Any) -> Any:
    fields = {"tools": [SHELL, PING], "messages": HELLO, **fields}
    extra = {"prompt_cache_key": json.dumps(answer), **fields.pop("extra_body", {})}
    return client.chat.completions.create(model="fake", extra_body=extra, **fields)


def whole(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    return ask(client, {"text": text, "chunk": 3}, **fields).choices[0]


def streamed(client: openai.OpenAI, text: str, chunk: int = 1, **fields: Any) -> dict[str, Any]:
    """The message that the deltas add up to, as a client joins them."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "finish": None}
    for part in ask(client, {"text": text, "chunk": chunk}, stream=True, **fields):
        choice = part.choices[0]
        assert message["finish"] is None
        message["finish"] = choice.finish_reason
        message["content"] += choice.delta.content or ""
        message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.index == len(message["tool_calls"]):
                assert call.id
                assert call.type == "function"
                message["tool_calls"].append({"name": call.function.name, "arguments": ""})
            message["tool_calls"][call.index]["arguments"] += call.function.arguments or ""
    return message


def test_whole_answer_with_calls(client: openai.OpenAI) -> None:
    choice = whole(client, CALLS)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment."
    assert choice.message.reasoning_content == choice.message.reasoning == "I look first."
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "shell")
    assert json.loads(first.function.arguments) == {"command": "mkdir -p a/{b1,b2"}
    assert (second.function.name, second.function.arguments) == ("ping", "{}")
    assert len({first.id, second.id}) == 2


def test_a_session_that_waits_for_a_tool_is_held(client: openai.OpenAI, served: Served) -> None:
    """Its cache stays warm: the next turn is on the way. Other endings hold nothing."""
    before = served.stats()["quickturn_engine_held_total"]
    assert whole(client, "no tools").finish_reason == "stop"
    assert whole(client, CALLS).finish_reason == "tool_calls"
    served.wait_for(lambda stats: stats["quickturn_engine_held_total"] == before + 1)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1000])
def test_streamed_calls_are_the_whole_ones(client: openai.OpenAI, chunk: int) -> None:
    message = whole(client, CALLS).message
    assert streamed(client, CALLS, chunk) == {
        "content": message.content,
        "reasoning": message.reasoning_content,
        "tool_calls": [
            {"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls
        ],
        "finish": "tool_calls",
    }


def test_arguments_are_streamed_as_they_form(client: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "shell", "arguments": {"command": "' + "x" * 200 + '"}}</tool_call>'
    events = ask(client, {"text": text, "chunk": 4}, stream=True)
    pieces = [part.choices[0].delta.tool_calls for part in events]
    assert sum(piece is not None for piece in pieces) > 40


def test_only_calls_leave_no_content(client: openai.OpenAI) -> None:
    choice = whole(client, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.arguments == "{}"


def test_parallel_calls_can_be_switched_off(client: openai.OpenAI, served: Served) -> None:
    stopped = served.stats()["quickturn_engine_stopped_total"]
    choice = whole(client, CALLS, parallel_tool_calls=False)
    assert [call.function.name for call in choice.message.tool_calls] == ["shell"]
    assert choice.finish_reason == "tool_calls"
    served.wait_for(lambda stats: stats["quickturn_engine_stopped_total"] == stopped + 1)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_no_calls_without_tools(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    choice = whole(client, CALLS, **fields)
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert "<tool_call>" in choice.message.content


def test_a_cut_call_says_length(client: openai.OpenAI) -> None:
    choice = whole(client, '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}', max_tokens=50)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name == "shell"


def test_thinking_that_the_template_opened(client: openai.OpenAI) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    choice = whole(client, "hm\n</think>\n\nyes", extra_body=extra)
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "yes")
    plain = whole(client, "hm\n yes")
    assert plain.message.content == "hm\n yes"
    cut = whole(client, "hm hm", extra_body=extra)
    assert (cut.message.reasoning_content, cut.message.content) == ("hm hm", None)


@pytest.mark.parametrize("chunk", [1, 100])
def test_stop_strings_and_thinking(client: openai.OpenAI, chunk: int) -> None:
    text = "<think>\nDEFGHIJ\n</think>\n\nABCDEFGHIJ KLM"
    choice = ask(client, {"text": text, "chunk": chunk}, stop=["DEFGHIJ"]).choices[0]
    assert choice.message.reasoning_content == "DEFGHIJ"
    assert (choice.message.content, choice.finish_reason) == ("ABC", "stop")


def test_logprobs_of_tokens_that_a_parser_ate(client: openai.OpenAI) -> None:
    text = '<tool_call>{"name": "ping"}</tool_call>'
    choice = whole(client, text, logprobs=True, top_logprobs=2)
    tokens = [entry.token for entry in choice.logprobs.content]
    assert "".join(tokens) == text + "<|im_end|>"
    events = ask(client, {"text": text, "chunk": 5}, logprobs=True, top_logprobs=2, stream=True)
    entries = [e for part in events if part.choices[0].logprobs for e in part.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == tokens


def test_usage_chunk_beside_calls(client: openai.OpenAI) -> None:
    events = list(
        ask(client, {"text": CALLS, "cached": 5}, stream=True, stream_options={"include_usage": True})
    )
    assert [part.choices == [] for part in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage.prompt_tokens_details.cached_tokens == 5
    assert all(part.usage is None for part in events[:-1])


def test_two_choices_each_with_calls(client: openai.OpenAI) -> None:
    answer = ask(client, {"text": CALLS, "chunk": 2}, n=2)
    ids = {call.id for choice in answer.choices for call in choice.message.tool_calls}
    assert len(ids) == 4


def test_tools_and_their_calls_are_rendered(client: openai.OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a <tool_call> b"},
    ]
    prompt = ask(client, {"echo": True}, messages=messages).choices[0].message.content
    assert prompt.count('{"type": "function", "function": {"name": "') == 2
    assert (
        '<<think>>\nhm\n<</think>>\n\n\n<<tool_call>>\n{"name": "shell", "arguments": {"command": "ls"}}'
        in prompt
    )
    assert "a <tool_call> b" in prompt


def test_harmless_fields(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        {"text": "ok"},
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        reasoning_effort="low",
        safety_identifier="x",
        verbosity="low",
        prediction={"type": "content", "content": "x"},
    )
    assert answer.choices[0].message.content == "ok"
