"""Structural tags (xgrammar's JSON for grammars) from what APIs ask for."""

import json
from collections.abc import Sequence
from typing import Any

from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.structured.schema import checked_schema

Format = dict[str, Any]

MAX_SPACES = 24
"""White space between the parts of a JSON value: enough for an indented one, and an end to a model that
writes nothing else.
"""


def json_schema(schema: Any, style: str = "json") -> Format:
    """JSON that is valid under `schema`. Raises BadSchema for one that can't be followed."""
    return {
        "type": "json_schema",
        "json_schema": checked_schema(schema),
        "style": style,
        "max_whitespace_cnt": MAX_SPACES,
    }


def json_object() -> Format:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Format:
    """Text that the whole of `pattern` matches."""
    return {"type": "regex", "pattern": pattern}


def ebnf(grammar: str) -> Format:
    """Text of a grammar in GBNF, from its rule `root`."""
    return {"type": "grammar", "grammar": grammar}


def literal(text: str) -> Format:
    """Exactly `text`."""
    return {"type": "const_string", "value": text}


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(element: Format) -> Format:
    """It, or nothing."""
    return {"type": "optional", "content": element}


def repeated(element: Format, at_most_once: bool = False) -> Format:
    """It once or more often."""
    return element if at_most_once else {"type": "plus", "content": element}


def space() -> Format:
    """A few line breaks or spaces, or none."""
    return regex("[ \\n]{0,3}")


def markup(alphabet: Alphabet, text: str) -> list[Format]:
    """`text` with control tokens by their ids, as the parser will want to see them."""
    ids = {char: index for index, char in alphabet.ids.items()}
    elements: list[Format] = []
    plain = ""
    for char in alphabet.spell(text):
        if char not in ids:
            plain += char
            continue
        if plain:
            elements.append(literal(plain))
        elements.append({"type": "token", "token": ids[char]})
        plain = ""
    return [*elements, literal(plain)] if plain else elements


def source(format: Format) -> str:
    """The structural tag of a whole answer."""
    return json.dumps({"type": "structural_tag", "format": format}, ensure_ascii=False)
