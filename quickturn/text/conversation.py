"""Brings chat messages of every dialect into the one form that chat templates read."""

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


class BadMessage(ValueError):
    """A message that can't be rendered; `param` is its place, such as `messages[2].content`."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def normalise_messages(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Fresh messages for a template of the given source.

    Content becomes one string (absent and empty ones ''), arguments of past tool calls become objects,
    reasoning goes by both names that templates read, and the role `developer` becomes `system` where the
    template doesn't know it. Raises BadMessage.
    """
    if not messages:
        raise BadMessage("messages", "messages must hold at least one message")
    return [_normalise(message, f"messages[{index}]", template) for index, message in enumerate(messages)]


def in_user_turns(messages: Sequence[Message], places: Sequence[int]) -> list[Message]:
    """The messages at `places` said by the user."""
    return [{**m, "role": "user"} if index in places else m for index, m in enumerate(messages)]


def merged_with_neighbours(messages: Sequence[Message], places: Sequence[int]) -> list[Message]:
    """The messages at `places` as the beginning of the user message behind them (the end of the one before,
    where none follows): for templates that want user and assistant to alternate.
    """
    result: list[Message] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        if index in places:
            waiting.append(message["content"])
        elif waiting and message["role"] == "user":
            result.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            result.append(message)
    last = next((m for m in reversed(result) if m["role"] == "user"), None)
    if waiting and last is not None:
        last = {**last, "content": "\n\n".join([last["content"], *waiting])}
        at = max(index for index, message in enumerate(result) if message["role"] == "user")
        result[at] = last
    elif waiting:
        result.append({"role": "user", "content": "\n\n".join(waiting)})
    return result


def _normalise(message: dict[str, Any], place: str, template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadMessage(f"{place}.role", f"{place}.role must be a non-empty string")
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and "developer" not in template:
        result["role"] = "system"
    result["content"] = _content(message.get("content"), f"{place}.content")
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"{place}.tool_calls")
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(content: Any, place: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadMessage(place, f"{place} must be a string or a list of content parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise BadMessage(
                f"{place}[{index}].type",
                f"content parts of type {kind!r} are not supported; this model reads text only",
            )
        if not isinstance(part.get("text"), str):
            raise BadMessage(f"{place}[{index}].text", f"{place}[{index}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadMessage(place, f"{place} must be a list")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadMessage(f"{place}[{index}]", f"{place}[{index}] must have a function with a name")
        result.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return result


def _arguments(arguments: Any) -> Any:
    """An object where the client sent one or its JSON; anything else stays as the model wrote it."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
