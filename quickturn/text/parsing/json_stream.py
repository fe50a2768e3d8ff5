"""JSON as it comes: values are passed on character by character, and strings are known for what they are."""

import json
import re
from typing import Any

from quickturn.text.parsing.reader import SPACE, Reader, Sink, Steps

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,}\]\ud800-\udfff]")


def stream_value(reader: Reader, sink: Sink) -> Steps[bool]:
    """Pass one JSON value to `sink`, verbatim, and return whether it was whole.

    Braces inside strings are text, so an object ends where JSON says, not where a brace happens to stand.
    """
    first = yield from reader.peek()
    if first not in ("{", "[", '"'):
        return (yield from _stream_scalar(reader, sink))
    depth, in_string = 0, False
    while True:
        text, at, whole = reader.buffer, 0, False
        while at < len(text) and not whole:
            found = (_INSIDE if in_string else _OUTSIDE).search(text, at)
            if found is None:
                at = len(text)
            elif in_string and found[0] == "\\":
                if found.end() == len(text) and not reader.ended:
                    at = found.start()
                    break
                at = found.end() + 1
            else:
                at = found.end()
                if found[0] == '"':
                    in_string = not in_string
                else:
                    depth += 1 if found[0] in "{[" else -1
                whole = depth <= 0 and not in_string
        if at:
            sink(reader.take(at))
        if whole or reader.ended:
            return whole
        yield


def take_value(reader: Reader) -> Steps[str]:
    """One JSON value as text."""
    parts: list[str] = []
    yield from stream_value(reader, parts.append)
    return "".join(parts)


def take_string(reader: Reader) -> Steps[str | None]:
    """The content of the JSON string that comes next; None if it's no whole string."""
    if (yield from reader.peek()) != '"':
        return None
    value = loads(
        (yield from take_value(reader)),
    )
    return value if isinstance(value, str) else None


def loads(text: str) -> Any:
    """The value of `text`; None for what isn't JSON. Raw control characters in strings are accepted."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object."""
    return isinstance(loads(text), dict)


def _stream_scalar(reader: Reader, sink: Sink) -> Steps[bool]:
    seen = False
    while True:
        found = _SCALAR_END.search(reader.buffer)
        count = len(reader.buffer) if found is None else found.start()
        if count:
            seen = True
            sink(reader.take(count))
        if found is not None or reader.ended:
            return seen
        yield


def skip_space(reader: Reader) -> Steps[str]:
    """Consume the white space between JSON tokens."""
    return (yield from reader.skip(SPACE))
