# ruff: noqa: E501  (one schema a line)
"""Schemas as people send them, and answers drawn at random from a grammar."""

import random
from typing import Any

ENUM = {"enum": ["red", "green", 7, None, True]}
FIXED: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "boolean"}}},
    {"type": "object", "required": ["a", "b"]},
    {"properties": {"a": {"minimum": 3, "maximum": 9}}, "required": ["a"]},
    {"type": ["integer", "null"]},
    {"type": "array", "items": ENUM, "minItems": 1, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 2, "items": False},
    {"type": "array", "items": [{"const": "a"}, {"const": "b"}], "additionalItems": False},
    {"type": "string", "pattern": "^[A-Z]{2}-\\d{1,4}$"},
    {"type": "string", "pattern": "(foo|ba[rz])+"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "number", "maximum": 3},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 4},
    {"type": "integer", "minimum": -100, "maximum": 1000, "multipleOf": 7},
    {"type": "integer", "minimum": 1.5},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0},
    {"const": {"a": [1, "x", None]}},
    {"type": "string", "enum": ["a", 1, "b"]},
    {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]},
               {"type": "object", "properties": {"kind": {"const": "b"}, "y": {"type": "null"}}, "required": ["kind"]}]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
     "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
               {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]},
    {"type": "integer", "maximum": 10, "allOf": [{"minimum": 3}]},
    {"$defs": {"n": {"type": "integer", "minimum": 0}}, "type": "object", "required": ["x"],
     "properties": {"x": {"$ref": "#/$defs/n", "maximum": 5, "description": "few"}}},
    {"$defs": {"tree": {"type": "object", "properties": {"value": {"type": "integer"}, "children": {
        "type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}}, "required": ["value"],
        "additionalProperties": False}}, "$ref": "#/$defs/tree"},
    {"definitions": {"s": {"type": "string", "maxLength": 4}}, "type": "array", "items": {"$ref": "#/definitions/s"}},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}],
                                            "default": None, "title": "A"}}, "title": "T"},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,2}$"}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"ü": {"type": "string", "maxLength": 3}, "a\"b": {"type": "null"}},
     "required": ["ü", "a\"b"]},
    {"type": "object", "properties": {"a": True, "b": {}}, "required": ["b"]},
    {"type": "boolean"},
    {"type": "null"},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}, "maxItems": 2}, "maxItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "minProperties": 1,
     "additionalProperties": False},
)  # fmt: skip

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"not": {"type": "string"}}, "not"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, "if"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "pattern": "^(?=.*x)[a-z]+$"}, "pattern"),
    ({"type": "string", "pattern": "^(a|b)\\1$"}, "pattern"),
    ({"type": "string", "pattern": "^a+$", "minLength": 3}, "minLength"),
    ({"type": "string", "format": "email", "maxLength": 3}, "maxLength"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"$ref": "http://example.com/x"}, "$ref"),
    ({"$ref": "#/$defs/missing"}, "$ref"),
    ({"type": "strin"}, "type"),
    ({"minimum": 3, "minLength": 2}, "type"),
    ({"type": "string", "maxLength": 10**9}, "maxLength"),
    ({"type": "object", "properties": {"a": {"properties": {"b": {"not": {}}}}}}, "not"),
    ({"enum": []}, "enum"),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}}, "patternProperties"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "required"),
    ({"anyOf": [{"type": "string", "pattern": "a"}], "pattern": "b"}, "pattern"),
    ({"type": "string", "allOf": [{"type": "integer"}]}, "type"),
    ({"frobnicate": 1}, "frobnicate"),
)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of supported keywords, put together at random."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum"]
    kinds += ["object", "object", "object", "array", "anyOf"] if depth < 3 else []
    kind = rng.choice(kinds)
    if kind == "string":
        low = rng.randrange(4)
        shapes = [
            {"maxLength": rng.randrange(1, 12)},
            {"minLength": low, "maxLength": low + rng.randrange(8)},
            {"pattern": rng.choice(["^[a-z]{1,8}$", "^\\w+@\\w+$", "[0-9]{2,4}", "^(x|yy)z?$"])},
            {"format": rng.choice(["date", "time", "email", "uuid", "ipv4", "hostname"])},
        ]
        return {"type": "string", **rng.choice(shapes)}
    if kind in ("integer", "number"):
        low = rng.randrange(-50, 50)
        bounds = {"minimum": low, "maximum": low + rng.randrange(100)}
        kept = {key: value for key, value in bounds.items() if rng.random() < 0.6}
        return {"type": kind, **kept}
    if kind == "enum":
        return {
            "enum": rng.sample(["a", "b c", "ü", 1, 2.5, None, True, [1], {"k": "v"}], rng.randrange(1, 5))
        }
    if kind == "object":
        names = rng.sample(["id", "name", "größe", "tags", "x y", "value"], rng.randrange(0, 5))
        required = [name for name in names if rng.random() < 0.6]
        extra = {"additionalProperties": False} if rng.random() < 0.5 else {}
        properties = {name: random_schema(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, **extra}
    if kind == "array":
        low = rng.randrange(3)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    return {"type": kind}


def drawn_schemas(seed: int, count: int) -> list[dict[str, Any]]:
    """`count` schemas: the fixed ones, then random ones."""
    rng = random.Random(seed)
    return [*FIXED, *(random_schema(rng) for _ in range(count - len(FIXED)))][:count]
