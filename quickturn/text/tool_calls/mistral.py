"""Mistral: `[TOOL_CALLS]` and a list of call objects, or (newer) `[TOOL_CALLS]name[ARGS]{...}` a call."""

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.output import short_id
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.call_object import read_call_object
from quickturn.text.tool_calls.json_arguments import read_arguments

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _section(parsing: Parsing, opener: str) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    yield from reader.skip()
    if (yield from reader.accept("[")):
        yield from _list(parsing)
        return
    name, found = yield from reader.take_until((spell(ARGS), spell(CALL_ID), "{"), keep=True)
    id = ""
    if found == spell(CALL_ID):
        yield from reader.accept(found)
        id, _ = yield from reader.take_until((spell(ARGS), "{"), keep=True)
    yield from reader.accept(spell(ARGS))
    parsing.out.start_call(name, id.strip())
    yield from reader.skip()
    yield from read_arguments(parsing)
    parsing.out.end_call()


def _list(parsing: Parsing) -> Steps[None]:
    reader = parsing.reader
    while True:
        yield from reader.skip(", \n\t")
        if (yield from reader.accept("]")) or not (yield from read_call_object(parsing)):
            return


FORMAT = ToolFormat("mistral", (OPEN,), _section, tokens=frozenset((OPEN, ARGS, CALL_ID)), new_id=short_id)
