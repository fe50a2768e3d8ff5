"""What a tool's schema says about its arguments, for markup in which each stands by itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quickturn.text.structured import formats
from quickturn.text.structured.formats import Format
from quickturn.text.structured.schema import BadSchema, checked_schema
from quickturn.text.tools import Tool

_BESIDE = ("anyOf", "$ref", "enum", "const", "patternProperties", "propertyNames", "minProperties")


@dataclass(frozen=True)
class Argument:
    """One argument. `shared` are definitions that its schema may refer to."""

    key: str
    schema: Mapping[str, Any]
    required: bool
    shared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_anything(self) -> bool:
        """Whether the schema says nothing."""
        return not self.schema

    @property
    def words(self) -> list[str] | None:
        """The strings that it has to be one of, if the schema lists nothing else."""
        found = [self.schema["const"]] if "const" in self.schema else self.schema.get("enum")
        return found if isinstance(found, list) and all(isinstance(word, str) for word in found) else None

    def as_json(self) -> Format:
        """The value as JSON."""
        return formats.json_schema({**self.schema, **self.shared} if self.schema else True)


def arguments_of(tool: Tool, names: str = r"[^<>]+") -> list[Argument]:
    """A tool's arguments in the schema's order; those whose names the pattern `names` doesn't match can't be
    written. Raises BadSchema for a strict tool whose schema can't be followed so.
    """
    try:
        return _read(checked_schema({"type": "object", **tool.parameters}), names)
    except BadSchema:
        if tool.strict:
            raise
    known = tool.parameters.get("properties")
    return [
        Argument(key, {}, False)
        for key in (known if isinstance(known, dict) else ())
        if re.fullmatch(names, key)
    ]


def _read(schema: Mapping[str, Any], names: str) -> list[Argument]:
    for word in _BESIDE:
        if word in schema:
            raise BadSchema(word, "", "can't be followed in this model's markup of calls")
    required = schema.get("required", ())
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = []
    for key, value in (schema.get("properties") or {}).items():
        if not re.fullmatch(names, key):
            raise BadSchema("properties", f"/properties/{key}", "has a name that this markup can't hold")
        found.append(Argument(key, value if isinstance(value, dict) else {}, key in required, shared))
    return found
