"""`GET /openapi.json`: the HTTP surface, from the types that bodies are decoded into."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.anthropic_turn import CountBody, MessagesBody
from quickturn.server.openai_chat import ChatBody
from quickturn.server.openai_completions import CompletionBody
from quickturn.server.replying import json_response
from quickturn.server.responses_body import ResponsesBody
from quickturn.server.tokens import DetokenizeBody, TokenizeBody
from quickturn.version import __version__

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_TEXT = {"type": "string"}
_OBJECT: Schema = {"type": "object"}


def _tagged(kind: str, **fields: Schema) -> Schema:
    """An object whose `type` is `kind`, with `fields`, all of them needed."""
    properties = {"type": {"const": kind}, **fields}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _message(roles: tuple[str, ...], content: list[Schema], **optional: Schema) -> Schema:
    """A message of one of `roles` with content of one of the kinds of parts, or text."""
    parts = {"type": "array", "items": {"anyOf": content}}
    properties = {"role": {"enum": list(roles)}, "content": {"anyOf": [_TEXT, parts]}, **optional}
    return {"type": "object", "properties": properties, "required": ["role", "content"]}


_CALL = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": _TEXT, "arguments": _TEXT},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_CHAT_MESSAGE = _message(
    ("system", "developer", "user", "assistant", "tool"),
    [_tagged("text", text=_TEXT)],
    tool_calls={"type": "array", "items": _CALL},
    tool_call_id=_TEXT,
    reasoning_content=_TEXT,
)
_CLAUDE_MESSAGE = _message(
    ("user", "assistant", "system"),
    [
        _tagged("text", text=_TEXT),
        _tagged("thinking", thinking=_TEXT, signature=_TEXT),
        _tagged("tool_use", id=_TEXT, name=_TEXT, input=_OBJECT),
        _tagged("tool_result", tool_use_id=_TEXT, content=_TEXT),
    ],
)
_ITEM = {
    "anyOf": [
        _message(("system", "developer", "user", "assistant"), [_tagged("input_text", text=_TEXT)]),
        _tagged("reasoning", summary={"type": "array", "items": _tagged("summary_text", text=_TEXT)}),
        _tagged("function_call", call_id=_TEXT, name=_TEXT, arguments=_TEXT),
        _tagged("function_call_output", call_id=_TEXT, output=_TEXT),
    ]
}
_REFINED: dict[tuple[str, str], Schema] = {
    ("ChatBody", "messages"): {"type": "array", "items": _CHAT_MESSAGE},
    ("MessagesBody", "messages"): {"type": "array", "items": _CLAUDE_MESSAGE},
    ("CountBody", "messages"): {"type": "array", "items": _CLAUDE_MESSAGE},
    ("ResponsesBody", "input"): {"anyOf": [_TEXT, {"type": "array", "items": _ITEM}]},
}
"""What the types leave open, because it is read message by message."""


@dataclass(frozen=True)
class Operation:
    """One operation. `body`: the type of its body, if it has one; `streams`: it can answer with events."""

    path: str
    method: str
    summary: str
    body: type | None = None
    streams: bool = False
    open: bool = False
    """Needs no API key."""


OPERATIONS = (
    Operation("/v1/chat/completions", "post", "Answer a chat (OpenAI Chat Completions)", ChatBody, True),
    Operation("/v1/completions", "post", "Continue prompts (OpenAI Completions)", CompletionBody, True),
    Operation("/v1/responses", "post", "Answer items (OpenAI Responses)", ResponsesBody, True),
    Operation("/v1/responses/{id}", "get", "A stored response"),
    Operation("/v1/responses/{id}", "delete", "Forget a stored response"),
    Operation("/v1/responses/{id}/input_items", "get", "What a stored response was asked"),
    Operation("/v1/messages", "post", "Answer a conversation (Anthropic Messages)", MessagesBody, True),
    Operation("/v1/messages/count_tokens", "post", "Tokens of a conversation", CountBody),
    Operation("/v1/models", "get", "Models that are served"),
    Operation("/v1/models/{model}", "get", "One model"),
    Operation("/tokenize", "post", "Token ids of a text or a chat", TokenizeBody),
    Operation("/detokenize", "post", "Text of token ids", DetokenizeBody),
    Operation("/health", "get", "Whether requests are taken", open=True),
    Operation("/health/live", "get", "Whether the server works", open=True),
    Operation("/metrics", "get", "Figures for Prometheus", open=True),
)


async def openapi(request: Request) -> Response:
    """The OpenAPI document of this server."""
    return json_response(document())


@cache
def document() -> Schema:
    """The OpenAPI 3.1 document."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF)
    for (name, field), schema in _REFINED.items():
        schemas[name]["properties"][field] = schema
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quickturn", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _described(operation: Operation) -> Schema:
    answers: Schema = {"application/json": {"schema": {}}}
    if operation.streams:
        answers["text/event-stream"] = {"schema": _TEXT}
    described: Schema = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Done", "content": answers},
            "default": {
                "description": "An error object that says what to change",
                "content": {"application/json": {"schema": _OBJECT}},
            },
        },
        "security": [] if operation.open else [{}, {"key": []}],
    }
    if operation.path == "/metrics":
        described["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    if operation.body is not None:
        reference = {"$ref": _REF.format(name=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    return described
