"""Whether the keywords of a JSON schema have values of their kinds: whoever follows it takes that for
granted.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_Rule = tuple[Callable[[Any], bool], str]


def flaw(schema: Any, place: str = "") -> tuple[str, str, str] | None:
    """The first keyword of `schema`, or of a schema in it, whose value is of a wrong kind: the keyword, where
    it stands, and what is wrong. None if all is well.
    """
    waiting = [(schema, place)]
    while waiting:
        schema, place = waiting.pop()
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            return "type", place, "is missing: a schema must be an object or a boolean"
        for key, value in schema.items():
            good, words = _RULES.get(key, _ANYTHING)
            if not good(value):
                return key, place, f"must be {words}"
        waiting += _inner(schema, place)
    return None


def _inner(schema: Mapping[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas in a schema whose own keywords are well."""
    for key in schema.keys() & _RULES.keys():
        value, rule = schema[key], _RULES[key]
        if rule is _SCHEMAS:
            yield from ((each, f"{place}/{key}/{name}") for name, each in value.items())
        elif rule is _SCHEMA or (rule is _ITEMS and not isinstance(value, list)):
            yield value, f"{place}/{key}"
        elif rule in (_LIST, _ITEMS):
            yield from ((each, f"{place}/{key}/{index}") for index, each in enumerate(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_type(value: Any) -> bool:
    return value is None or isinstance(value, str) or (value != [] and _are_names(value))


_ANYTHING: _Rule = (lambda value: True, "anything")
_SCHEMA: _Rule = (_is_schema, "a schema")
_ITEMS: _Rule = (lambda value: _is_schema(value) or isinstance(value, list), "a schema or a list of schemas")
_LIST: _Rule = (lambda value: isinstance(value, list), "a list of schemas")
_SCHEMAS: _Rule = (lambda value: isinstance(value, dict), "an object of schemas")
_NUMBER: _Rule = (_is_number, "a number")
_RULES: dict[str, _Rule] = {
    "type": (_is_type, "a name or names"),
    "enum": (lambda value: isinstance(value, list), "a list"),
    "required": (_are_names, "a list of names"),
    "format": (lambda value: value is None or isinstance(value, str), "a string"),
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _SCHEMAS),
    **dict.fromkeys(("items", "additionalItems"), _ITEMS),
    **dict.fromkeys(("additionalProperties", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _NUMBER),
    **dict.fromkeys(("minProperties", "maxProperties"), _NUMBER),
}
