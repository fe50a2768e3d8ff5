"""From the items of the Responses API to chat messages, each in its place."""

from collections.abc import Mapping, Sequence
from typing import Any

from quickturn.server.assistant_parts import AssistantParts
from quickturn.server.errors import ApiError, invalid, not_supported

Item = dict[str, Any]
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def input_items(value: str | Sequence[Any], known: Mapping[str, Item]) -> list[Item]:
    """`input` as items; references become the items of earlier responses (`known`, by id) that they name.
    Raises ApiError.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items = []
    for index, item in enumerate(value):
        place = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(place, f"{place} must be an object")
        if _kind(item) == "item_reference":
            found = known.get(str(item.get("id")))
            if found is None:
                raise ApiError(
                    404, f"{place}: there is no item {item.get('id')!r}", param=place, code="item_not_found"
                )
            item = found
        items.append(item)
    return items


def chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Messages in the form that chat templates read. Raises ApiError naming the item that can't be used."""
    result: list[dict[str, Any]] = []
    if instructions:
        result.append({"role": "system", "content": instructions})
    parts, names = AssistantParts(), dict[str, str]()
    for index, item in enumerate(items):
        place = f"input[{index}]"
        kind = _kind(item)
        if kind == "reasoning":
            parts.thinking(_reasoning(item, place))
        elif kind == "function_call":
            id, name = _string(item, "call_id", place), _string(item, "name", place)
            names[id] = name
            parts.call(id, name, item.get("arguments"))
        elif kind == "message" and item.get("role") == "assistant":
            parts.text(_text(item.get("content"), f"{place}.content"))
        else:
            result += parts.take()
            result.append(_other(item, kind, place, names))
    return [*result, *parts.take()]


def _other(item: Item, kind: Any, place: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The message of an item that isn't the model's own."""
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise invalid(
                f"{place}.role", f"{place}.role must be user, assistant, system or developer, got {role!r}"
            )
        return {"role": role, "content": _text(item.get("content"), f"{place}.content")}
    if kind == "function_call_output":
        id = _string(item, "call_id", place)
        content = _text(item.get("output"), f"{place}.output")
        return {"role": "tool", "tool_call_id": id, "name": names.get(id, ""), "content": content}
    raise not_supported(f"{place}.type", f"{place}.type {kind!r} is not supported")


def _kind(item: Item) -> Any:
    """The type of an item; messages may leave theirs out."""
    return item.get("type", "message" if "role" in item else None)


def _reasoning(item: Item, place: str) -> str:
    """What the model thought, else the summary that was made of it."""
    content = item.get("content") or item.get("summary")
    return _text(content, f"{place}.content")


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(place, f"{place} must be a string or a list of content parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise not_supported(
                f"{place}[{index}].type",
                f"{place}[{index}].type {kind!r} is not supported: this model reads text only",
            )
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", f"{place}[{index}]"))
    return "\n".join(texts)


def _string(item: Item, key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{place}.{key}", f"{place}.{key} must be a string")
    return value
