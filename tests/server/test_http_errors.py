"""Wrong requests: OpenAI's error shape, naming the field; and what is clamped rather than refused."""

import json
import socket
from typing import Any

import httpx
import pytest
from servers import PATIENCE_S, Served, http

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


def chat(served: Served, **fields: Any) -> httpx.Response:
    return http.post(f"{served.url}/chat/completions", json={**HELLO, **fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"temperature": 1000}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"priority": 1 << 40}, "priority"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        ({"response_format": {"type": "regex", "pattern": "odd"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json"),
        ({"guided_regex": "(?=a)"}, "guided_regex"),
        ({"guided_regex": "odd"}, "guided_regex"),
        ({"guided_grammar": "root ::= odd"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": 7}, "guided_grammar"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
                ]
            },
            "tools",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice",
        ),
        ({"modalities": ["audio"]}, "modalities"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_field_is_named(served: Served, fields: dict[str, Any], param: str, stream: bool) -> None:
    response = chat(served, **{"stream": stream, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, None),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, 100000]}, "prompt[1]"),
        ({"prompt": [[1, -1]]}, "prompt[0][1]"),
        ({"prompt": "x", "echo": "yes"}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "guided_choice": ["odd"]}, "guided_choice"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
def test_wrong_completion_field_is_named(served: Served, fields: dict[str, Any], param: str | None) -> None:
    response = http.post(f"{served.url}/completions", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_unknown_and_harmless_fields_are_ignored(served: Served) -> None:
    response = chat(
        served,
        user="u",
        store=False,
        metadata={"a": "b"},
        parallel_tool_calls=True,
        nonsense={"x": [1]},
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        temperature=None,
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": "\\ud83d"}', b'{"messages": ' + b"[" * 100_000]
)
def test_broken_body(served: Served, body: bytes) -> None:
    response = http.post(f"{served.url}/chat/completions", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_model_path_and_method(served: Served) -> None:
    missing = chat(served, model="gpt-9")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert http.get(f"{served.url}/nothing").json()["error"]["message"]
    assert http.get(f"{served.url}/chat/completions").status_code == 405


def test_max_tokens_is_clamped_to_what_is_left(served: Served) -> None:
    response = chat(served, max_tokens=65_535, prompt_cache_key=json.dumps({"endless": True, "chunk": 500}))
    answer = response.json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 4096


@pytest.mark.parametrize("length", [4096 - 19, 4096, 100_000])
def test_prompt_beyond_the_context(served: Served, length: int) -> None:
    response = chat(served, messages=[{"role": "user", "content": "x" * length}])
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length" in error["message"]
    assert "4096" in error["message"]
    assert str(length + 19) in error["message"]


def test_one_token_left_is_enough(served: Served) -> None:
    response = chat(served, messages=[{"role": "user", "content": "x" * (4096 - 20)}])
    assert response.json()["usage"]["completion_tokens"] == 1


def test_extremes_that_are_fine(served: Served) -> None:
    for fields in (
        {"top_k": 1 << 60},
        {"top_k": -1},
        {"seed": -(1 << 63), "n": 2},
        {"seed": (1 << 63) - 1, "n": 2},
        {"max_tokens": 1 << 60},
        {"temperature": 0, "top_p": 1e-9},
        {"stop_token_ids": list(range(300))},
    ):
        response = chat(served, **fields)
        assert response.status_code == 200, (fields, response.text)


@pytest.mark.parametrize("how", ["refuse", "raise"])
def test_engine_refusal(served: Served, how: str) -> None:
    response = chat(served, prompt_cache_key=json.dumps({how: "it can never fit: 12 of 10 blocks"}))
    assert response.status_code == 400
    assert "never fit" in response.json()["error"]["message"]


def test_engine_refusal_in_a_stream(served: Served) -> None:
    response = chat(served, stream=True, prompt_cache_key=json.dumps({"refuse": "it can never fit"}))
    last = response.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "it can never fit"


def test_limits_of_a_body(own_server: Any) -> None:
    server = own_server(limits={"body": 1000, "body_seconds": 0.2, "messages": 2})
    response = chat(server, messages=[{"role": "user", "content": "x" * 2000}])
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    response = chat(server, messages=[{"role": "user", "content": "x"}] * 3)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


def test_a_body_that_never_ends(own_server: Any) -> None:
    server = own_server(limits={"body_seconds": 0.2})
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port), timeout=PATIENCE_S) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode() + b'{"messages"')
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


def test_pages_of_other_origins(own_server: Any) -> None:
    asking = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    name = "access-control-allow-origin"
    closed = own_server()
    assert name not in httpx.options(f"{closed.url}/chat/completions", headers=asking).headers
    assert name not in http.get(f"{closed.url}/models", headers=asking).headers
    opened = own_server(serve={"cors_origins": ["https://page.example"]}, api_keys=["secret"])
    assert httpx.options(f"{opened.url}/chat/completions", headers=asking).headers[name] == asking["Origin"]
    stranger = {**asking, "Origin": "https://other.example"}
    assert name not in httpx.options(f"{opened.url}/chat/completions", headers=stranger).headers


def test_api_key(own_server: Any) -> None:
    server = own_server(api_keys=["one", "two"])
    url = f"{server.url}/models"
    assert http.get(url).status_code == 401
    assert http.get(url, headers={"Authorization": "Bearer three"}).status_code == 401
    assert http.get(url, headers={"Authorization": "Bearer two"}).status_code == 200
    assert http.get(f"{server.root}/health").status_code == 200
