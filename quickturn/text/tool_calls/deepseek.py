"""DeepSeek V3 and V3.1: a section of calls between control tokens. V3 wraps the arguments in a code fence,
V3.1 doesn't.
"""

# ruff: noqa: RUF001  (the vertical lines of these models are full-width)

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.json_arguments import read_arguments

SECTION, END_SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TOKENS = frozenset((SECTION, END_SECTION, CALL, SEPARATOR, END_CALL))


def _section(parsing: Parsing, fenced: bool) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    while True:
        yield from reader.skip()
        if not (yield from reader.accept(spell(CALL))):
            yield from reader.accept(spell(END_SECTION))
            return
        head, _ = yield from reader.take_until((spell(SEPARATOR),))
        name = (yield from reader.take_until(("\n",)))[0] if fenced else head
        parsing.out.start_call(name)
        yield from reader.skip()
        if fenced:
            yield from reader.accept("```json")
            yield from reader.skip()
        yield from read_arguments(parsing)
        parsing.out.end_call()
        ends = (spell(END_CALL), spell(END_SECTION))
        if (yield from reader.take_until(ends))[1] != ends[0]:
            return


def _v3(parsing: Parsing, opener: str) -> Steps[None]:
    yield from _section(parsing, fenced=True)


def _v31(parsing: Parsing, opener: str) -> Steps[None]:
    yield from _section(parsing, fenced=False)


V3 = ToolFormat("deepseek_v3", (SECTION,), _v3, tokens=TOKENS, closer=END_SECTION)
V31 = ToolFormat("deepseek_v31", (SECTION,), _v31, tokens=TOKENS, closer=END_SECTION)
