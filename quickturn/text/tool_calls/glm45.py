"""GLM 4.5 to 4.7: `<tool_call>name` and pairs of `<arg_key>`, `<arg_value>`; 4.7 without line breaks."""

import string

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.output import ArgumentWriter
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.parameters import read_parameter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    yield from reader.skip()
    name, _ = yield from reader.take_until((spell(KEY), spell(CLOSE), "\n"), keep=True)
    parsing.out.start_call(name)
    writer = ArgumentWriter(parsing.out, name)
    while True:
        yield from reader.skip()
        if not (yield from reader.accept(spell(KEY))):
            break
        key, _ = yield from reader.take_until((spell(END_KEY),))
        yield from reader.skip()
        if not (yield from reader.accept(spell(VALUE))):
            break
        if not (yield from read_parameter(parsing, writer, key, (spell(END_VALUE),))):
            break
    if reader.ended != "length":
        writer.end()
    parsing.out.end_call()
    yield from reader.take_until((spell(CLOSE),))


FORMAT = ToolFormat(
    "glm45",
    (OPEN,),
    _section,
    tokens=frozenset((OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)),
    closer=CLOSE,
    first=string.ascii_letters + "_",
)
