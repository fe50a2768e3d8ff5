"""Arguments that are written one by one between tags, as raw text without quotes."""

from collections.abc import Sequence

from quickturn.text.parsing.formats import Parsing
from quickturn.text.parsing.json_stream import take_value
from quickturn.text.parsing.output import ArgumentWriter
from quickturn.text.parsing.reader import Steps


def read_parameter(
    parsing: Parsing,
    writer: ArgumentWriter,
    key: str,
    ends: Sequence[str],
    *,
    is_string: bool = False,
    is_json: bool = False,
    trim: bool = False,
) -> Steps[str]:
    """Read the value of `key` up to the first of `ends`, and return which it was. `trim`: one line break at
    each end of the value belongs to the markup.

    A value that the answer's length limit cut stays open, so that nobody takes it for a whole one.

    Values that can only be strings (or are said to be: `is_string`) are streamed; of others the schema says
    what they are, unless the model said that they are JSON (`is_json`).
    """
    writer.key(key)
    if is_string or writer.is_string(key):
        writer.begin_string()
        sink = _Trimmed(writer).push if trim else writer.piece
        found = yield from parsing.reader.until(ends, sink)
        if found or parsing.reader.ended == "stop":
            writer.end_string()
        return found
    # A string within JSON may hold the end of the markup.
    has_strings = is_json and (yield from parsing.reader.peek()) in ("{", "[", '"')
    begun = (yield from take_value(parsing.reader)) if has_strings else ""
    text, found = yield from parsing.reader.take_until(ends)
    if is_json:
        writer.json_value(key, begun + text)
    else:
        writer.value(key, text.removeprefix("\n").removesuffix("\n") if trim else text)
    return found


class _Trimmed:
    """Passes a string value on without its first and its last line break."""

    def __init__(self, writer: ArgumentWriter) -> None:
        self._writer = writer
        self._held = ""
        self._at_start = True

    def push(self, text: str) -> None:
        if self._at_start:
            self._at_start = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._writer.piece(text[: len(text) - len(self._held)])
