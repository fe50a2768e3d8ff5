"""Tools that a model may call, and what their schemas say about arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_JSON_TYPES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


@dataclass(frozen=True)
class Tool:
    """A function with JSON arguments. `parameters` is a JSON schema; `definition` is what chat templates get,
    as the client wrote it. `strict`: arguments must follow the schema.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False
    definition: Mapping[str, Any] = field(default_factory=dict)


def argument_types(tool: Tool | None, key: str) -> frozenset[str]:
    """JSON types that the argument `key` may have; empty when the schema says nothing."""
    if tool is None:
        return frozenset()
    properties = tool.parameters.get("properties")
    schema = properties.get(key) if isinstance(properties, dict) else None
    return _types(schema, tool.parameters, 8, set())


def value_fits(value: Any, types: frozenset[str]) -> bool:
    """Whether a decoded JSON value has one of `types` (any, if they are empty)."""
    kind = _JSON_TYPES.get(type(value), "")
    if not types or kind in types or (kind == "integer" and "number" in types):
        return True
    return isinstance(value, float) and value.is_integer() and "integer" in types


def call_is_valid(tools: Sequence[Tool], name: str, arguments: Any) -> bool:
    """Whether a call names a tool, has its required arguments, and each argument's type fits."""
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None or not isinstance(arguments, dict):
        return False
    required = tool.parameters.get("required")
    if isinstance(required, list) and not all(isinstance(key, str) and key in arguments for key in required):
        return False
    properties = tool.parameters.get("properties")
    known = properties if isinstance(properties, dict) else {}
    closed = tool.parameters.get("additionalProperties") is False
    return all(
        (key in known or not closed) and value_fits(value, argument_types(tool, key))
        for key, value in arguments.items()
    )


def _types(schema: Any, root: Mapping[str, Any], depth: int, followed: set[str]) -> frozenset[str]:
    """`followed`: references that were seen, each of which is read once."""
    if not isinstance(schema, dict) or depth == 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(kind for kind in named if isinstance(kind, str))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    if values:
        return frozenset(_JSON_TYPES.get(type(value), "") for value in values)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if reference in followed:
            return frozenset()
        followed.add(reference)
        return _types(_resolve(root, reference), root, depth - 1, followed)
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            return frozenset().union(*(_types(each, root, depth - 1, followed) for each in schema[word]))
    return frozenset()


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
