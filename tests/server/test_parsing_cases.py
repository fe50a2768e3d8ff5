"""Cases of parsing that clients report and that other files don't hold, through HTTP: streamed in pieces of
every size and whole, which must say the same.
"""

import json
from typing import Any

import openai
import pytest
from servers import Served

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
LIST = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls a/{b1,b2"}}\n</tool_call>'
NOTHING = '<tool_call>{"name": "ping"}</tool_call>'
LISTED = ("shell", {"command": "ls a/{b1,b2"})


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url, api_key="any", max_retries=0)


def answers(client: openai.OpenAI, text: str, **fields: Any) -> dict[str, Any]:
    """What an answer says, which is the same whole and in pieces of any size."""
    wanted = _answer(client, text, 1000, False, fields)
    for chunk in (1, 3, 11, 1000):
        assert _answer(client, text, chunk, True, fields) == wanted, f"in pieces of {chunk}"
    return wanted


def _answer(
    client: openai.OpenAI, text: str, chunk: int, stream: bool, fields: dict[str, Any]
) -> dict[str, Any]:
    script = {"prompt_cache_key": json.dumps({"text": text, "chunk": chunk})}
    answer: Any = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "go"}], tools=[SHELL, PING], stream=stream,
        extra_body=script, **fields,
    )  # fmt: skip
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for choice in choices:
        part = choice.delta if stream else choice.message
        said["finish"] = choice.finish_reason or said["finish"]
        said["content"] += part.content or ""
        said["reasoning"] += getattr(part, "reasoning_content", None) or ""
        for call in part.tool_calls or ():
            if call.id:
                said["calls"].append([call.function.name, ""])
            said["calls"][-1][1] += call.function.arguments or ""
    said["calls"] = [(name, json.loads(arguments)) for name, arguments in said["calls"]]
    return said


def test_p22_p25_a_call_without_arguments_and_the_next_in_one_piece(client: openai.OpenAI) -> None:
    said = answers(client, NOTHING + LIST + NOTHING)
    assert said["calls"] == [("ping", {}), LISTED, ("ping", {})]
    assert (said["content"], said["finish"]) == ("", "tool_calls")


def test_p27_prose_in_thinking_makes_no_call(client: openai.OpenAI) -> None:
    thought = f"I could write <tool_call> here, as in {LIST}. No."
    for end in ("", "</think>Done."):
        said = answers(client, f"<think>{thought}{end}")
        assert (said["reasoning"], said["calls"], said["finish"]) == (thought, [], "stop")
        assert said["content"] == end.removeprefix("</think>")


@pytest.mark.parametrize("calls", [1, 2])
def test_p27_calls_that_end_the_thinking_are_made(client: openai.OpenAI, calls: int) -> None:
    said = answers(client, f"<think>Let me see.\n{chr(10).join([LIST, NOTHING][:calls])}")
    assert said["calls"] == [LISTED, ("ping", {})][:calls]
    assert (said["reasoning"], said["content"], said["finish"]) == ("Let me see.", "", "tool_calls")


def test_p29_a_tail_that_was_held_back_comes_out(client: openai.OpenAI) -> None:
    assert answers(client, "ABC DEFGH", stop=["DEFGHIJ"])["content"] == "ABC DEFGH"
    said = answers(client, "<think>DEFGHIJ</think>ABC DEFGHIJ K", stop=["DEFGHIJ"])
    assert (said["content"], said["reasoning"], said["finish"]) == ("ABC ", "DEFGHIJ", "stop")


def test_p30_the_reason_agrees_with_the_body(client: openai.OpenAI) -> None:
    assert answers(client, "x" + LIST)["finish"] == "tool_calls"
    assert answers(client, "x")["finish"] == "stop"
    assert answers(client, "x" * 30, max_tokens=20)["finish"] == "length"
    assert answers(client, LIST + "x" * 60, max_tokens=len(LIST))["finish"] == "length"
