"""Content blocks as chat messages."""

from typing import Any

import pytest

from quickturn.server.anthropic_content import chat_messages
from quickturn.server.errors import ApiError


def use(id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": f"tool_{id}", "input": arguments}


def called(id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": f"tool_{id}", "arguments": arguments}}


def thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "x"}


def result(id: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_interleaved_thinking_and_calls_keep_their_order() -> None:
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [thinking("r1"), use("a", x=1), thinking("r2"), use("b")]},
        {"role": "user", "content": [result("a", "one"), result("b", [text("two")]), text("and?")]},
    ]
    assert chat_messages(None, messages) == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "reasoning_content": "r1", "tool_calls": [called("a", x=1)]},
        {"role": "assistant", "content": "", "reasoning_content": "r2", "tool_calls": [called("b")]},
        {"role": "tool", "tool_call_id": "a", "name": "tool_a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "name": "tool_b", "content": "two"},
        {"role": "user", "content": "and?"},
    ]


def test_text_behind_a_call_begins_a_message() -> None:
    messages = [
        {
            "role": "assistant",
            "content": [text("a"), use("c"), text("b"), thinking("t"), text("d"), text("e")],
        },
        {"role": "user", "content": []},
    ]
    assert chat_messages("", messages) == [
        {"role": "assistant", "content": "a", "tool_calls": [called("c")]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "d\ne", "reasoning_content": "t"},
        {"role": "user", "content": ""},
    ]


def test_a_line_that_differs_in_every_request_is_not_for_the_model() -> None:
    system = [text("x-anthropic-billing-header: cc_version=1; cch=5a1f;"), text("You are"), text("helpful.")]
    question = {"role": "user", "content": "hi"}
    assert chat_messages(system, [question]) == [{"role": "system", "content": "You are\nhelpful."}, question]


def test_a_system_message_in_the_middle_stays_there() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None},
        {"role": "system", "content": "now in French"},
        {"role": "user", "content": "b"},
    ]
    roles = [message["role"] for message in chat_messages(None, messages)]
    assert roles == ["user", "assistant", "system", "user"]


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "tool", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "document"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content.0.text"),
        ({"role": "user", "content": [{"type": "tool_result"}]}, "messages.0.content.0.tool_use_id"),
        ({"role": "assistant", "content": "Once"}, "messages"),
    ],
)
def test_what_cannot_be_used_is_named(message: dict[str, Any], place: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_messages(None, [message])
    assert refused.value.param == place
