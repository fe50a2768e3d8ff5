"""Calls as Python writes them: `[look(city="Oslo", days=3), ping()]`."""

import json
from collections.abc import Sequence

from quickturn.text.structured import formats
from quickturn.text.structured.arguments import Argument, arguments_of
from quickturn.text.structured.formats import Format
from quickturn.text.tools import Tool

_NAMES = r"[\w.$-]+"
_ESCAPE = r"\\['\"\\nrt]"


def python_call(tool: Tool) -> Format:
    """One call of `tool`, required arguments first. Raises BadSchema for a strict tool whose schema can't be
    followed.
    """
    arguments = arguments_of(tool, _NAMES)
    first = [_argument(each) for each in arguments if each.required]
    others = [_argument(each) for each in arguments if not each.required]
    inner = _all_of(first, others) if first else _some_of(others)
    return formats.sequence(formats.literal(f"{tool.name}("), *inner, formats.literal(")"))


def _all_of(first: Sequence[Format], others: Sequence[Format]) -> list[Format]:
    comma = formats.literal(", ")
    elements = [first[0]]
    for each in first[1:]:
        elements += [comma, each]
    return elements + [formats.optional(formats.sequence(comma, each)) for each in others]


def _some_of(others: Sequence[Format]) -> list[Format]:
    """Any of them, in their order: one is the first, and some of those behind it follow."""
    begun = [formats.sequence(*_all_of(others[at : at + 1], others[at + 1 :])) for at in range(len(others))]
    return [formats.optional(formats.either(begun))] if begun else []


def _argument(argument: Argument) -> Format:
    return formats.sequence(formats.literal(f"{argument.key}="), _value(argument))


def _value(argument: Argument) -> Format:
    """JSON, which the parser takes, too; Python's own words and quotes where a value is nothing else."""
    schema, words = argument.schema, argument.words
    if words is not None:
        ways = {repr(word) for word in words} | {json.dumps(word, ensure_ascii=False) for word in words}
        return formats.either([formats.literal(way) for way in sorted(ways)])
    if schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return formats.either([formats.literal("True"), formats.literal("False")])
    value = argument.as_json()
    if schema.get("type") != "string" or schema.keys() & {"pattern", "format", "enum", "const"}:
        return value
    bounds = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
    return formats.either([formats.regex(rf"'([^'\\\x00-\x1f]|{_ESCAPE}){bounds}'"), value])
