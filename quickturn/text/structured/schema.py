"""Which JSON schemas can be followed to the letter, and in which form the grammar compiler gets them.

A keyword that the compiler would ignore makes answers that the schema forbids, so it is refused here, by
name. What can be said in other words is rewritten: every answer to the rewritten schema is valid under the
one that was sent.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quickturn.text.structured.merge import ANNOTATIONS, CannotMerge, merge
from quickturn.text.structured.shape import flaw

MAX_DEPTH = 64
MAX_NODES = 20_000
MAX_REPEAT = 10_000
MAX_PATTERN = 2_000

FAR = 10**15
"""Numbers are no larger where a schema leaves one side open: doubles hold every integer up to there."""

_NUMERIC = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_STRING = {"minLength", "maxLength", "pattern", "format"}
_ARRAY = {"items", "prefixItems", "minItems", "maxItems", "additionalItems", "unevaluatedItems"}
_OBJECT = {
    "properties",
    "required",
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
}
_GENERAL = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions"}
_KNOWN = _NUMERIC | _STRING | _ARRAY | _OBJECT | _GENERAL
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_OPEN_WORDS = re.compile(r"\(\?(?!:)|\\[bBpPk1-9]")


class BadSchema(ValueError):
    """A schema that can't be followed; the text names the keyword and its place."""

    def __init__(self, keyword: str, place: str, why: str) -> None:
        super().__init__(f"the schema's keyword {keyword!r} at {place or '#'} {why}")
        self.keyword = keyword


def checked_schema(schema: Any) -> Any:
    """`schema` as the grammar compiler should get it. Raises BadSchema for what it can't express."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise BadSchema("type", "", "is missing: a schema must be an object")
    _check_shape(schema, "")
    return _Checker(schema).check(schema, "", 0)


def _check_shape(schema: Any, place: str) -> None:
    found = flaw(schema, place)
    if found is not None:
        raise BadSchema(*found)


class _Checker:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._nodes = 0
        self._seen: set[int] = set()

    def check(self, schema: Any, place: str, depth: int) -> Any:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise BadSchema(
                "$schema", place, f"is too deep or too large ({MAX_DEPTH} levels, {MAX_NODES} parts)"
            )
        if isinstance(schema, bool):
            if not schema:
                raise BadSchema("false", place, "allows nothing: leave it out")
            return schema
        if not isinstance(schema, dict):
            raise BadSchema("type", place, "is missing: a schema must be an object or a boolean")
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        schema = self._without_combinations(schema, place)
        for key, value in schema.items():
            if key not in _KNOWN and not (key == "uniqueItems" and value is False):
                raise BadSchema(key, place, "is not supported in structured output")
        schema.pop("uniqueItems", None)
        for step in (_with_type, _check_enum, _check_strings, _check_numbers, _check_arrays, _check_objects):
            schema = step(schema, place)
        return self._children(schema, place, depth + 1)

    def _without_combinations(self, schema: dict[str, Any], place: str) -> dict[str, Any]:
        """Keywords beside `allOf`, `anyOf`, `oneOf` and `$ref` move into them: the compiler ignores them."""
        try:
            for part in self._taken(schema, "allOf", place):
                schema = merge(schema, self._resolved(part, place, len(schema) > 0))
                if isinstance(schema, bool):
                    if not schema:
                        raise BadSchema("allOf", place, "allows nothing")
                    schema = {}
            for word in ("oneOf", "anyOf"):
                branches = self._taken(schema, word, place)
                if not branches:
                    continue
                if word == "oneOf" and not _exclusive([self._resolved(b, place, True) for b in branches]):
                    raise BadSchema("oneOf", place, "has branches that may both hold: use anyOf")
                beside = {key: schema.pop(key) for key in list(schema) if key not in ("$defs", "definitions")}
                merged = [merge(beside, self._resolved(b, place, bool(beside))) for b in branches]
                schema["anyOf"] = merged
            if "$ref" in schema and any(key not in ("$ref", "$defs", "definitions") for key in schema):
                reference = {"$ref": schema.pop("$ref")}
                schema = merge(schema, self._resolved(reference, place, True))
        except CannotMerge as error:
            raise BadSchema(error.keyword, place, "can't be combined with what stands beside it") from error
        return schema

    def _taken(self, schema: dict[str, Any], word: str, place: str) -> list[Any]:
        parts = schema.pop(word, [])
        if not isinstance(parts, list):
            raise BadSchema(word, place, "must be a list of schemas")
        return parts

    def _resolved(self, schema: Any, place: str, needed: bool) -> Any:
        """`schema`, its reference replaced by what it refers to if something has to be merged into it."""
        if not isinstance(schema, dict):
            return schema
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        for _ in range(MAX_DEPTH):
            if not needed or "$ref" not in schema:
                return schema
            target = self._target(schema.pop("$ref"), place)
            if not isinstance(target, dict):
                raise BadSchema("$ref", place, "refers to what is no object")
            target = {key: value for key, value in target.items() if key not in ANNOTATIONS}
            schema = merge(schema, target) if schema else dict(target)
        raise BadSchema("$ref", place, "refers to itself")

    def _target(self, reference: Any, place: str) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise BadSchema("$ref", place, f"must point into the schema itself, got {reference!r}")
        found: Any = self._root
        for part in filter(None, reference[1:].split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise BadSchema("$ref", place, f"points to nothing: {reference!r}")
            found = found[part]
        if id(found) not in self._seen:
            # It may stand where no schema is looked for.
            self._seen.add(id(found))
            _check_shape(found, reference)
        return found

    def _children(self, schema: dict[str, Any], place: str, depth: int) -> dict[str, Any]:
        def one(value: Any, key: str) -> Any:
            return self.check(value, f"{place}/{key}", depth)

        result = dict(schema)
        if "$ref" in result:
            self._target(result["$ref"], place)
        for key in ("items", "additionalProperties", "propertyNames"):
            if isinstance(result.get(key), dict):
                result[key] = one(result[key], key)
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            if key in result:
                if not isinstance(result[key], dict):
                    raise BadSchema(key, place, "must be an object")
                result[key] = {name: one(each, f"{key}/{name}") for name, each in result[key].items()}
        for key in ("prefixItems", "anyOf"):
            if key in result:
                if not isinstance(result[key], list) or not result[key]:
                    raise BadSchema(key, place, "must be a list of schemas")
                result[key] = [one(each, f"{key}/{index}") for index, each in enumerate(result[key])]
        return result


def _with_type(schema: dict[str, Any], place: str) -> dict[str, Any]:
    """A schema without a type gets the one that its keywords speak of: the compiler would ignore them."""
    kind = schema.get("type")
    named = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(each in _TYPES for each in named):
        raise BadSchema("type", place, f"must be one of {', '.join(_TYPES)}")
    if kind is not None or {"enum", "const", "anyOf", "$ref"} & schema.keys():
        return schema
    spoken = [
        name
        for name, words in (("number", _NUMERIC), ("string", _STRING), ("array", _ARRAY), ("object", _OBJECT))
        if words & schema.keys()
    ]
    if len(spoken) > 1:
        raise BadSchema("type", place, "is missing, and the other keywords speak of several types")
    return {"type": spoken[0], **schema} if spoken else schema


def _check_enum(schema: dict[str, Any], place: str) -> dict[str, Any]:
    if "enum" not in schema and "const" not in schema:
        return schema
    word = "const" if "const" in schema else "enum"
    values = [schema["const"]] if word == "const" else schema["enum"]
    if not isinstance(values, list):
        raise BadSchema("enum", place, "must be a list")
    if word == "const" and isinstance(schema.get("enum"), list):
        values = [value for value in values if value in schema["enum"]]
    for key in schema.keys() - {"enum", "const", "type", "$defs", "definitions"}:
        raise BadSchema(key, place, f"can't be combined with {word}")
    kind = schema.get("type", list(_TYPES))
    kinds = kind if isinstance(kind, list) else [str(kind)]
    kept = [value for value in values if any(_is(value, each) for each in kinds)]
    if not kept:
        raise BadSchema(word, place, "allows nothing")
    rest: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    return {"const": kept[0], **rest} if word == "const" else {"enum": kept, **rest}


def _check_strings(schema: dict[str, Any], place: str) -> dict[str, Any]:
    lengths: list[str] = [key for key in ("minLength", "maxLength") if key in schema]
    shapes = [key for key in ("pattern", "format") if key in schema]
    if "format" in shapes and schema["format"] not in FORMATS:
        # A format that isn't known is an annotation, as the standard has it.
        schema = {key: value for key, value in schema.items() if key != "format"}
        shapes.remove("format")
    if len(shapes) == 2 or (shapes and lengths):
        raise BadSchema((lengths or shapes)[0], place, f"can't be combined with {shapes[-1]!r}")
    _check_counts(schema, lengths, place)
    if "pattern" in schema:
        check_pattern(schema["pattern"], "pattern", place)
    return schema


FORMATS = frozenset(
    (
        "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri",
        "uri-reference", "uri-template", "json-pointer", "relative-json-pointer",
    )
)  # fmt: skip
"""Formats that the compiler knows."""


def check_pattern(pattern: Any, keyword: str, place: str) -> None:
    """Refuse a regular expression with what the compiler would misread."""
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise BadSchema(keyword, place, f"must be a string of at most {MAX_PATTERN} characters")
    found = _OPEN_WORDS.search(pattern.replace("\\\\", ""))
    if found is not None:
        raise BadSchema(
            keyword,
            place,
            f"has {found[0]!r}: look-around, flags, back references, word borders "
            "and character properties are not supported",
        )


def _check_numbers(schema: dict[str, Any], place: str) -> dict[str, Any]:
    result = dict(schema)
    for key in _NUMERIC & schema.keys():
        value = schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadSchema(key, place, "must be a number")
    kinds = schema.get("type")
    if _NUMERIC & schema.keys() and kinds in ("integer", ["integer"]):
        rounding: tuple[tuple[str, Callable[[float], int]], ...] = (
            ("minimum", math.ceil),
            ("maximum", math.floor),
            ("exclusiveMinimum", math.floor),
            ("exclusiveMaximum", math.ceil),
        )
        for key, rounded in rounding:
            if key in result:
                result[key] = rounded(result[key])
    if "multipleOf" not in schema:
        result = _with_both_bounds(result, kinds)
    if "multipleOf" in schema and (
        kinds not in ("integer", ["integer"]) or not _is(schema["multipleOf"], "integer")
    ):
        raise BadSchema("multipleOf", place, "is supported for integers only")
    return result


def _with_both_bounds(schema: dict[str, Any], kinds: Any) -> dict[str, Any]:
    """A number that is bounded on one side gets a far bound on the other: without it, it has digits without
    end, and a model may not find one.
    """
    lower = any(key in schema for key in ("minimum", "exclusiveMinimum"))
    upper = any(key in schema for key in ("maximum", "exclusiveMaximum"))
    if lower == upper or kinds not in ("integer", ["integer"], "number", ["number"]):
        return schema
    key, far = ("maximum", FAR) if lower else ("minimum", -FAR)
    near = max(abs(schema[name]) for name in _NUMERIC & schema.keys())
    return schema | {key: far} if near < FAR else schema


def _check_arrays(schema: dict[str, Any], place: str) -> dict[str, Any]:
    result = dict(schema)
    if isinstance(schema.get("items"), list):
        # Drafts before 2020-12: a list is what is called prefixItems now.
        result["prefixItems"] = result.pop("items")
        if "additionalItems" in result:
            result["items"] = result.pop("additionalItems")
    result.pop("additionalItems", None)
    _check_counts(result, [key for key in ("minItems", "maxItems") if key in result], place)
    return result


def _check_objects(schema: dict[str, Any], place: str) -> dict[str, Any]:
    if not _OBJECT & schema.keys():
        return schema
    result = dict(schema)
    properties = dict(schema.get("properties") or {})
    extra = schema.get("additionalProperties", "properties" not in schema)
    patterns = schema.get("patternProperties") or {}
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise BadSchema("required", place, "must be a list of names")
    for name in required:
        if name not in properties:
            if extra is False and "additionalProperties" in schema and not patterns:
                raise BadSchema("required", place, f"names {name!r}, which additionalProperties forbids")
            properties[name] = extra if isinstance(extra, dict) else True
    if properties:
        result["properties"] = properties
    for pattern in patterns:
        check_pattern(pattern, "patternProperties", place)
    if patterns and (properties or extra not in (False, True)):
        raise BadSchema("patternProperties", place, "can't be combined with properties or a schema of others")
    if patterns:
        result["additionalProperties"] = False
    if schema.get("minProperties") and (patterns or extra is not False):
        raise BadSchema("minProperties", place, "needs additionalProperties to be false")
    _check_counts(schema, [key for key in ("minProperties", "maxProperties") if key in schema], place)
    return result


def _check_counts(schema: Mapping[str, Any], keys: Sequence[str], place: str) -> None:
    for key in keys:
        value = schema[key]
        if not _is(value, "integer") or not 0 <= value <= MAX_REPEAT:
            raise BadSchema(key, place, f"must be an integer from 0 to {MAX_REPEAT}")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    types: dict[str, Any] = {
        "string": str,
        "number": (int, float),
        "integer": int,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    return kind in types and isinstance(value, types[kind])


def _exclusive(branches: list[Any]) -> bool:
    """Whether no value fits two branches: their types differ, or a property that all require does."""
    kinds = [_kinds(branch) for branch in branches]
    if all(kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds)):
        return not {"integer", "number"} <= frozenset().union(*kinds)
    names = [set(branch.get("required", ())) if isinstance(branch, dict) else set() for branch in branches]
    for name in set.intersection(*names) if names else ():
        values = [
            _values(branch["properties"].get(name)) if "properties" in branch else [] for branch in branches
        ]
        flat = [repr(value) for each in values for value in each]
        if all(values) and len(flat) == len(set(flat)):
            return True
    return False


def _kinds(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    values = _values(schema)
    if values:
        return frozenset(f"={value!r}" for value in values)
    kind = schema.get("type")
    return frozenset(kind if isinstance(kind, list) else [kind] if kind else [])


def _values(schema: Any) -> list[Any]:
    if not isinstance(schema, dict):
        return []
    if "const" in schema:
        return [schema["const"]]
    return list(schema["enum"]) if isinstance(schema.get("enum"), list) else []
