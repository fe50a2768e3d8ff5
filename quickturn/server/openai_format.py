"""`response_format` of the OpenAI APIs, and the fields that vLLM made common for patterns and grammars."""

from typing import Any

from quickturn.server.errors import ApiError, invalid, not_supported
from quickturn.server.fields import CommonFields
from quickturn.text.structured import formats
from quickturn.text.structured.formats import Format
from quickturn.text.structured.schema import BadSchema, check_pattern

MAX_GRAMMAR = 256 << 10
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def read_output(fields: CommonFields) -> Format | None:
    """What either way of asking says. Raises ApiError, also if both are used."""
    output = read_response_format(fields.response_format)
    other = read_guided({name: getattr(fields, name) for name in GUIDED})
    if output is not None and other is not None:
        raise not_supported("response_format", "response_format can't be combined with guided decoding")
    return output if output is not None else other


def output_param(fields: CommonFields) -> str:
    """The field that says what the answer has to follow, to blame for what can't be followed."""
    return next((name for name in GUIDED if getattr(fields, name) is not None), "response_format")


def read_response_format(value: Any, param: str = "response_format") -> Format | None:
    """The format that an answer's text has to follow; None for free text. Raises ApiError."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return formats.json_object()
    if kind == "json_schema":
        inner = value.get("json_schema", value)
        schema = inner.get("schema") if isinstance(inner, dict) else None
        return read_schema(
            schema, f"{param}.json_schema.schema" if "json_schema" in value else f"{param}.schema"
        )
    if kind == "regex":
        return read_regex(value.get("pattern", value.get("regex")), f"{param}.pattern")
    if kind == "grammar":
        return read_grammar(value.get("grammar"), f"{param}.grammar")
    raise invalid(
        f"{param}.type",
        f"{param}.type must be text, json_object, json_schema, regex or grammar, got {kind!r}",
    )


def read_schema(schema: Any, param: str) -> Format:
    """JSON that follows `schema`. Raises ApiError naming the keyword that can't be followed."""
    if not isinstance(schema, dict):
        raise invalid(param, f"{param} must be a JSON schema")
    try:
        return formats.json_schema(schema)
    except BadSchema as error:
        raise bad_schema(error, param) from error


def bad_schema(error: BadSchema, param: str) -> ApiError:
    """400 for a schema that can't be followed, before anything is generated."""
    return ApiError(400, f"{param}: {error}", param=param, code="unsupported_schema")


def read_regex(pattern: Any, param: str) -> Format:
    """Text that a regular expression matches. Raises ApiError."""
    try:
        check_pattern(pattern, "pattern", "")
    except BadSchema as error:
        raise bad_schema(error, param) from error
    return formats.regex(pattern)


def read_grammar(grammar: Any, param: str) -> Format:
    """Text of a grammar in GBNF with a rule `root`. Raises ApiError."""
    if not isinstance(grammar, str) or not grammar.strip() or len(grammar) > MAX_GRAMMAR:
        raise invalid(param, f"{param} must be a grammar of at most {MAX_GRAMMAR} characters")
    return formats.ebnf(grammar)


def read_guided(fields: dict[str, Any]) -> Format | None:
    """The one of `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` that is given."""
    given = [name for name, value in fields.items() if value is not None]
    if not given:
        return None
    if len(given) > 1:
        raise not_supported(given[1], f"{given[0]} and {given[1]} can't be combined")
    name, value = given[0], fields[given[0]]
    if name == "guided_json":
        return read_schema(value, name)
    if name == "guided_regex":
        return read_regex(value, name)
    if name == "guided_grammar":
        return read_grammar(value, name)
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise invalid(name, f"{name} must be a list of strings")
    return formats.either([formats.literal(each) for each in value])
