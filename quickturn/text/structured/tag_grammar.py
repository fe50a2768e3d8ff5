"""Arguments between tags that are tokens of the vocabulary (GLM): each by itself, in the schema's order."""

from collections.abc import Mapping
from typing import Any

from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.structured import formats
from quickturn.text.structured.formats import Format
from quickturn.text.structured.schema import BadSchema, checked_schema
from quickturn.text.tools import Tool

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = [KEY, END_KEY, VALUE, END_VALUE]


def tagged_arguments(tool: Tool, alphabet: Alphabet) -> list[Format]:
    """The arguments of a call, required ones and others. Raises BadSchema for a strict tool whose schema
    can't be followed.
    """
    try:
        schema = checked_schema({"type": "object", **tool.parameters})
    except BadSchema:
        if tool.strict:
            raise
        schema = {"properties": dict.fromkeys(tool.parameters.get("properties") or {}, True)}
    required = schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    elements = []
    for key, value in (schema.get("properties") or {}).items():
        head = formats.markup(alphabet, f"\n{KEY}{key}{END_KEY}\n{VALUE}")
        argument = formats.sequence(
            *head, _value(value, shared, alphabet), *formats.markup(alphabet, END_VALUE)
        )
        elements.append(argument if key in required else formats.optional(argument))
    return elements


def _value(schema: Any, shared: Mapping[str, Any], alphabet: Alphabet) -> Format:
    """Strings stand as they are, other values as JSON."""
    if not isinstance(schema, dict):
        return _anything(alphabet)
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return formats.either([formats.literal(word) for word in words])
    if schema.get("type") != "string":
        return {**formats.json_schema({**schema, **shared}), "excludes": _TAGS}
    if "pattern" in schema:
        return formats.regex(schema["pattern"])
    if "minLength" in schema or "maxLength" in schema:
        return formats.regex(f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    return _anything(alphabet)


def _anything(alphabet: Alphabet) -> Format:
    return {"type": "any_tokens", "exclude_tokens": sorted(alphabet.ids)}
