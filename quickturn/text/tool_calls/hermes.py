"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, one block a call."""

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.call_object import read_call_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    reader = parsing.reader
    reader.record()
    yield from reader.skip()
    if not (yield from read_call_object(parsing)):
        parsing.out.text(parsing.spell(opener) + reader.recorded())
        return
    reader.recorded()
    # What stands between the object and the end of the block is white space, or a brace too many.
    yield from reader.take_until((parsing.spell(CLOSE),))


FORMAT = ToolFormat("hermes", (OPEN,), _section, tokens=frozenset((OPEN, CLOSE)), first="{", closer=CLOSE)
