"""Qwen3-Coder and Qwen3.5: `<function=name><parameter=key>value</parameter></function>` in a `<tool_call>`
block. The models now and then leave out the block's tag, or a parameter's end.
"""

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.output import ArgumentWriter
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.parameters import read_parameter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    reader, out = parsing.reader, parsing.out
    reader.record()
    yield from reader.skip()
    if opener == OPEN and not (yield from reader.accept(FUNCTION)):
        out.text(parsing.spell(opener) + reader.recorded())
        return
    name, found = yield from reader.take_until((">", "\n", "<"))
    before = reader.recorded()
    if found != ">" or (opener == FUNCTION and name not in out.tools):
        out.text(parsing.spell(opener) + before)
        return
    out.start_call(name)
    yield from _parameters(parsing, name)
    out.end_call()
    if opener == OPEN:
        yield from _more_functions(parsing)
    else:
        yield from reader.skip()
        yield from reader.accept(parsing.spell(CLOSE))


def _parameters(parsing: Parsing, name: str) -> Steps[None]:
    reader = parsing.reader
    writer = ArgumentWriter(parsing.out, name)
    ends = (END_PARAMETER, "\n" + PARAMETER, "\n" + END_FUNCTION)
    found = ""
    while found != ends[2]:
        if found != ends[1]:
            yield from reader.skip()
            if not (yield from reader.accept(PARAMETER)):
                yield from reader.accept(END_FUNCTION)
                break
        key, _ = yield from reader.take_until((">",))
        found = yield from read_parameter(parsing, writer, key, ends, trim=True)
        if not found:
            break
    if found or reader.ended != "length":
        writer.end()


def _more_functions(parsing: Parsing) -> Steps[None]:
    """To the end of the block; further functions in it are calls, too."""
    close = parsing.spell(CLOSE)
    while (yield from parsing.reader.take_until((close, FUNCTION)))[1] == FUNCTION:
        name, _ = yield from parsing.reader.take_until((">",))
        parsing.out.start_call(name)
        yield from _parameters(parsing, name)
        parsing.out.end_call()


FORMAT = ToolFormat("qwen3_coder", (OPEN, FUNCTION), _section, tokens=frozenset((OPEN, CLOSE)), closer=CLOSE)
