"""Kimi K2: a section of calls, each with an id `functions.name:number` that its template wants back."""

import re

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.json_arguments import read_arguments

SECTION, END_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, END_CALL = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.*?)(?::\d+)?", re.DOTALL)


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    while True:
        yield from reader.skip()
        if not (yield from reader.accept(spell(CALL))):
            yield from reader.accept(spell(END_SECTION))
            return
        head, _ = yield from reader.take_until((spell(ARGUMENTS),))
        id = head.strip()
        name = _ID.fullmatch(id)
        parsing.out.start_call(name[1] if name else id, id)
        yield from reader.skip()
        yield from read_arguments(parsing)
        parsing.out.end_call()
        ends = (spell(END_CALL), spell(END_SECTION))
        if (yield from reader.take_until(ends))[1] != ends[0]:
            return


FORMAT = ToolFormat(
    "kimi_k2",
    (SECTION,),
    _section,
    tokens=frozenset((SECTION, END_SECTION, CALL, ARGUMENTS, END_CALL)),
    closer=END_SECTION,
)
