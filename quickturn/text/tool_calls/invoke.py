"""`<invoke name="..."><parameter name="...">value</parameter></invoke>` in a section: MiniMax M2, and
DeepSeek V3.2, whose tags have a token in front of their name and say which values are strings.
"""

# ruff: noqa: RUF001  (the vertical lines of these models are full-width)

import re

from quickturn.text.parsing.formats import Parsing, ToolFormat
from quickturn.text.parsing.output import ArgumentWriter
from quickturn.text.parsing.reader import Steps
from quickturn.text.tool_calls.parameters import read_parameter

MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")
DSML = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
_NAME = re.compile(r"""name\s*=\s*["']?([^"'>]*)""")


def _section(parsing: Parsing, prefix: str, end: str) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    while True:
        yield from reader.skip()
        if not (yield from reader.accept(spell(f"<{prefix}invoke "))):
            yield from reader.accept(spell(end))
            return
        head, _ = yield from reader.take_until((">",))
        name = _name(head)
        parsing.out.start_call(name)
        yield from _parameters(parsing, prefix, ArgumentWriter(parsing.out, name))
        parsing.out.end_call()


def _parameters(parsing: Parsing, prefix: str, writer: ArgumentWriter) -> Steps[None]:
    reader, spell = parsing.reader, parsing.spell
    while True:
        yield from reader.skip()
        if not (yield from reader.accept(spell(f"<{prefix}parameter "))):
            yield from reader.accept(spell(f"</{prefix}invoke>"))
            break
        head, _ = yield from reader.take_until((">",))
        end = (spell(f"</{prefix}parameter>"),)
        is_string, is_json = (f'string="{said}"' in head for said in ("true", "false"))
        found = yield from read_parameter(
            parsing, writer, _name(head), end, is_string=is_string, is_json=is_json
        )
        if not found:
            break
    if reader.ended != "length":
        writer.end()


def _name(head: str) -> str:
    found = _NAME.search(head)
    return found[1] if found else ""


def _minimax(parsing: Parsing, opener: str) -> Steps[None]:
    yield from _section(parsing, "", MINIMAX[1])


def _dsml(parsing: Parsing, opener: str) -> Steps[None]:
    yield from _section(parsing, "｜DSML｜", DSML[1])


MINIMAX_M2 = ToolFormat(
    "minimax_m2", MINIMAX[:1], _minimax, tokens=frozenset(MINIMAX), first="<", closer=MINIMAX[1]
)
DEEPSEEK_V32 = ToolFormat("deepseek_v32", DSML[:1], _dsml, tokens=frozenset(("｜DSML｜",)), first="<")
