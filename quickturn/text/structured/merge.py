"""Two JSON schemas as one that is true where both are."""

from collections.abc import Callable, Mapping
from typing import Any

ANNOTATIONS = frozenset(
    (
        "title", "description", "default", "examples", "example", "$schema", "$id", "$comment", "deprecated",
        "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "nullable", "strict", "discriminator",
    )
)  # fmt: skip
"""Keywords that forbid nothing."""


class CannotMerge(ValueError):
    """The schemas hold a keyword whose two values no single value says."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


def merge(first: Any, second: Any) -> Any:
    """The conjunction of two schemas. Raises CannotMerge where it can't be written as one."""
    if first is True or first == {}:
        return second
    if second is True or second == {}:
        return first
    if not isinstance(first, Mapping) or not isinstance(second, Mapping):
        raise CannotMerge("false")
    result = dict(first)
    for key, value in second.items():
        if key in ANNOTATIONS:
            continue
        if key not in result or result[key] == value:
            result[key] = value
        elif key in _BOTH:
            result[key] = _BOTH[key](result[key], value)
        else:
            raise CannotMerge(key)
    if "properties" in result:
        result["properties"] = dict(result["properties"])
        _close(result, first, second)
    return result


def _close(result: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """A property that only one side names has to pass the other side's `additionalProperties`."""
    for own, other in ((first, second), (second, first)):
        extra = other.get("additionalProperties", True)
        for name in own.get("properties", {}).keys() - other.get("properties", {}).keys():
            if extra is False:
                if name in result.get("required", ()):
                    raise CannotMerge("additionalProperties")
                del result["properties"][name]
            elif extra is not True:
                result["properties"][name] = merge(result["properties"][name], extra)


def _types(first: Any, second: Any) -> Any:
    sets = [each if isinstance(each, list) else [each] for each in (first, second)]
    both = [kind for kind in sets[0] if kind in sets[1]]
    for one, other in (sets, reversed(sets)):
        if "integer" not in both and "integer" in one and "number" in other:
            both.append("integer")
    if not both:
        raise CannotMerge("type")
    return both[0] if len(both) == 1 else both


def _properties(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(first)
    for name, schema in second.items():
        result[name] = merge(result[name], schema) if name in result else schema
    return result


def _values(first: list[Any], second: list[Any]) -> list[Any]:
    both = [value for value in first if value in second]
    if not both:
        raise CannotMerge("enum")
    return both


def _extra(first: Any, second: Any) -> Any:
    return False if first is False or second is False else merge(first, second)


_BOTH: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "properties": _properties,
    "$defs": _properties,
    "definitions": _properties,
    "required": lambda first, second: list(dict.fromkeys([*first, *second])),
    "enum": _values,
    "additionalProperties": _extra,
    "items": _extra,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
