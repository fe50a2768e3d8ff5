"""Llama 3: an answer that is a call object, or several with a semicolon between; `<|python_tag|>` may stand
in front.
"""

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.call_object import read_call_object

TAG = "<|python_tag|>"


def _at_start(parsing: Parsing) -> Steps[bool]:
    reader = parsing.reader
    reader.record()
    yield from reader.skip()
    called = (yield from reader.peek()) == "{" and (yield from read_call_object(parsing, known_only=True))
    before = reader.recorded()
    if not called:
        if before:
            parsing.out.text(before)
        return False
    yield from reader.skip()
    if (yield from reader.accept(";")):
        yield from _at_start(parsing)
    return True


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    yield from _at_start(parsing)


FORMAT = ToolFormat("llama3_json", (TAG,), _section, tokens=frozenset((TAG,)), first="{", at_start=_at_start)
