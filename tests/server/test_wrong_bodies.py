"""Bodies that are wrong in any one place: an error object of the API's own, never a 500, never a lost
connection.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import PATIENCE_S, Served

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_FUNCTION = {"name": "f", "description": "d", "parameters": _SCHEMA}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
        "tools": [{"type": "function", "function": _FUNCTION}],
        "tool_choice": "required",
        "stop": ["z"],
        "logit_bias": {"5": 1},
        "chat_template_kwargs": {"a": 1},
        "max_tokens": 1,
    },
    "/v1/completions": {
        "prompt": ["x", [1, 2]],
        "logprobs": 1,
        "echo": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}},
        "max_tokens": 1,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ],
        "tools": [{"type": "function", **_FUNCTION, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "model": "fake",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "i", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": "r"}]},
        ],
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
        "stop_sequences": ["z"],
        "max_tokens": 1,
    },
    "/detokenize": {"tokens": [1, 2]},
}
_BODIES["/tokenize"] = {name: _BODIES["/v1/chat/completions"][name] for name in ("messages", "tools")}
_BODIES["/v1/messages/count_tokens"] = {
    name: _BODIES["/v1/messages"][name] for name in ("model", "system", "messages", "tools", "thinking")
}
_DEEP_LIST, _DEEP_OBJECT = "[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600
_ODD = [
    *("null", "true", "-1", "1e30", str(10**30), '""', "[]", "{}", "[[]]", "[{}]", '{"a": null}', '["a"]'),
    *(_DEEP_LIST, _DEEP_OBJECT, json.dumps(_DEEP_LIST), json.dumps("[" * 9000), json.dumps(_DEEP_OBJECT)),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything stands in a body."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


def with_odd(value: Any, place: tuple[Any, ...], odd: str) -> str:
    """The JSON of `value` with `odd` at a place of it."""
    if not place:
        return odd
    if isinstance(value, list):
        parts = [with_odd(v, place[1:], odd) if i == place[0] else json.dumps(v) for i, v in enumerate(value)]
        return f"[{', '.join(parts)}]"
    pairs = [
        f"{json.dumps(k)}: {with_odd(v, place[1:], odd) if k == place[0] else json.dumps(v)}"
        for k, v in value.items()
    ]
    return f"{{{', '.join(pairs)}}}"


@pytest.mark.parametrize("path", _BODIES)
def test_whatever_is_odd_in_a_body_is_answered_in_the_words_of_its_api(served: Served, path: str) -> None:
    body = _BODIES[path]
    with httpx.Client(base_url=served.root, timeout=PATIENCE_S) as client:
        good = client.post(path, json=body)
        assert good.status_code == 200, good.text
        for place in places(body):
            for odd in _ODD:
                where = f"{odd[:30]} at {place}"
                response = client.post(path, content=with_odd(body, place, odd))
                assert response.status_code < 500, f"{where}: {response.text[:300]}"
                if response.status_code != 200:
                    answer = response.json()
                    assert all(answer["error"][name] for name in ("message", "type")), where
                    assert answer.get("type") == ("error" if "/messages" in path else None), where


def test_arguments_that_are_too_deep_to_read_stay_as_the_model_wrote_them(served: Served) -> None:
    call = {**_CALL, "function": {"name": "f", "arguments": '{"a":' * 3000}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    with httpx.Client(base_url=served.root, timeout=PATIENCE_S) as client:
        answer = client.post("/tokenize", json={"messages": messages})
        assert answer.status_code == 200, answer.text[:300]
        text = client.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert '{"a":' * 3000 in text


def test_what_is_too_deep_is_told_so(served: Served) -> None:
    body = {**_BODIES["/v1/messages"], "tools": [{"name": "f", "input_schema": "?"}]}
    with httpx.Client(base_url=served.root, timeout=PATIENCE_S) as client:
        answer = client.post("/v1/messages", content=json.dumps(body).replace('"?"', _DEEP_OBJECT))
    assert answer.status_code == 400
    assert "nested too deeply" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_model_nests_too_deeply_ends_as_any_other(served: Served, stream: bool) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": ' + "[" * 1500 + "]" * 1500 + "}}\n</tool_call>"
    script = json.dumps({"text": text, "chunk": 500})
    asked = {"input": "x", "tools": [{"type": "function", **_FUNCTION}], "prompt_cache_key": script}
    with httpx.Client(base_url=served.root, timeout=PATIENCE_S) as client:
        answer = client.post("/v1/responses", json={**asked, "stream": stream})
        assert answer.status_code == 200, answer.text[:300]
        assert "[" * 1500 in answer.text
        asked = {**_BODIES["/v1/messages"], "max_tokens": 4000, "tool_choice": {"type": "auto"}}
        asked |= {"metadata": {"user_id": script}, "stream": stream, "thinking": None}
        answer = client.post("/v1/messages", json=asked)
        assert answer.status_code == 200, answer.text[:300]
        assert '"tool_use"' in answer.text
