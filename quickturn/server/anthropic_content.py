"""From Anthropic's content blocks to chat messages: every block in its place, none of them merged across a
border that the model saw.
"""

from collections.abc import Iterator
from typing import Any

from quickturn.server.assistant_parts import AssistantParts
from quickturn.server.errors import ApiError, invalid, not_supported

BILLING_LINE = "x-anthropic-billing-header:"
"""One client puts this line, which differs in every request, first in its system prompt. It isn't for the
model, and nothing behind it could ever be reused.
"""


def chat_messages(
    system: str | list[dict[str, Any]] | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages in the form that chat templates read. Raises ApiError naming the block that can't be used."""
    result: list[dict[str, Any]] = []
    parts = [part for part in _system_parts(system) if not part["text"].startswith(BILLING_LINE)]
    if any(part["text"] for part in parts):
        result.append({"role": "system", "content": _joined(parts)})
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        place = f"messages.{index}"
        match message.get("role"):
            case "user":
                result += _user(_blocks(message, place), names)
            case "assistant":
                result += _assistant(_blocks(message, place), names)
            case "system":
                result.append(
                    {"role": "system", "content": _text_of(message.get("content"), f"{place}.content")}
                )
            case other:
                raise invalid(f"{place}.role", f"{place}.role must be 'user' or 'assistant', got {other!r}")
    if messages and messages[-1].get("role") == "assistant":
        raise not_supported(
            "messages", "the last message must be the user's: beginning the answer is not supported"
        )
    return result


def _system_parts(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    if isinstance(system, str):
        return [{"text": system}]
    return [_part(block, f"system.{index}") for index, block in enumerate(system)]


def _part(block: Any, place: str) -> dict[str, Any]:
    """A text block as a part of a chat message's content."""
    part = {"type": "text", "text": _text(block, place)}
    return part if block.get("cache_control") is None else {**part, "cache_control": block["cache_control"]}


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts as one text, or as they are where a mark says that prompts may part between them."""
    if any("cache_control" in part for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


Block = tuple[str, dict[str, Any]]
"""A content block behind its place in the body."""


def _blocks(message: dict[str, Any], place: str) -> list[Block]:
    content = message.get("content")
    if content is None:
        return []
    if isinstance(content, str):
        return [(f"{place}.content", {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise invalid(f"{place}.content", f"{place}.content must be a string or a list of blocks")
    blocks = [(f"{place}.content.{index}", block) for index, block in enumerate(content)]
    for where, block in blocks:
        if not isinstance(block, dict):
            raise invalid(where, f"{where} must be an object")
    return blocks


def _user(blocks: list[Block], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A `tool` message for each result, and a `user` message for the text between two of them."""
    parts: list[dict[str, Any]] = []
    for place, block in blocks:
        if block.get("type") != "tool_result":
            parts.append(_part(block, place))
            continue
        if parts:
            yield {"role": "user", "content": _joined(parts)}
            parts = []
        id = block.get("tool_use_id")
        if not isinstance(id, str):
            raise invalid(f"{place}.tool_use_id", f"{place}.tool_use_id must be a string")
        text = _text_of(block.get("content"), f"{place}.content")
        content = _joined([_part({**block, "type": "text", "text": text}, place)])
        yield {"role": "tool", "tool_call_id": id, "name": names.get(id, ""), "content": content}
    if parts or not blocks:
        yield {"role": "user", "content": _joined(parts)}


def _assistant(blocks: list[Block], names: dict[str, str]) -> Iterator[dict[str, Any]]:
    parts = AssistantParts()
    parts.text("")
    for place, block in blocks:
        match block.get("type"):
            case "redacted_thinking":
                continue
            case "thinking":
                parts.thinking(_string(block, "thinking", place))
            case "tool_use":
                id, name = _string(block, "id", place), _string(block, "name", place)
                names[id] = name
                parts.call(id, name, block.get("input"))
            case _:
                parts.text(_text(block, place))
    return parts.take()


def _text_of(content: Any, place: str) -> str:
    """A string, or the text of a list of text blocks; '' for nothing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(place, f"{place} must be a string or a list of blocks")
    return "\n".join(_text(block, f"{place}.{index}") for index, block in enumerate(content))


def _text(block: Any, place: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("image", "document"):
        raise _text_only(place, kind)
    if kind != "text":
        raise invalid(f"{place}.type", f"{place}.type {kind!r} is not supported here")
    return _string(block, "text", place)


def _string(block: dict[str, Any], key: str, place: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise invalid(f"{place}.{key}", f"{place}.{key} must be a string")
    return value


def _text_only(place: str, kind: str) -> ApiError:
    return not_supported(place, f"{place} is of type {kind!r}, but this model reads text only")
