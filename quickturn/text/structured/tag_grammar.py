"""Arguments between tags (GLM, DeepSeek V3.2): each by itself, in the schema's order."""

# ruff: noqa: RUF001  (the vertical lines of DeepSeek's tokens are full-width)

from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.structured import formats
from quickturn.text.structured.arguments import Argument, arguments_of
from quickturn.text.structured.formats import Format
from quickturn.text.tools import Tool

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = [KEY, END_KEY, VALUE, END_VALUE]
_DSML = "｜DSML｜"
_END_PARAMETER = f"</{_DSML}parameter>"


def tagged_arguments(tool: Tool, alphabet: Alphabet) -> list[Format]:
    """The arguments of a call between GLM's tags, which say nothing of types. Raises BadSchema for a strict
    tool whose schema can't be followed.
    """
    free = _any_tokens(alphabet)
    elements = []
    for argument in arguments_of(tool):
        head = formats.markup(alphabet, f"\n{KEY}{argument.key}{END_KEY}\n{VALUE}")
        value = _text(argument, free) or {**argument.as_json(), "excludes": _TAGS}
        elements.append(_one(argument, head, value, formats.markup(alphabet, END_VALUE)))
    return elements


def dsml_arguments(tool: Tool, alphabet: Alphabet) -> list[Format]:
    """The arguments of a call between DeepSeek's tags, which say what is a string and what is JSON. Raises
    BadSchema for a strict tool whose schema can't be followed.
    """
    end = formats.markup(alphabet, _END_PARAMETER)
    is_token = alphabet.spell(_DSML) != _DSML
    free = _any_tokens(alphabet) if is_token else {"type": "any_text", "excludes": [_END_PARAMETER]}
    elements = []
    for argument in arguments_of(tool, r'[^"\'<>]+'):
        ways = []
        text = _text(argument, free)
        if text is not None:
            ways.append(_dsml(argument, "true", text, alphabet))
        if text is None or argument.is_anything:
            ways.append(_dsml(argument, "false", argument.as_json(), alphabet))
        elements.append(_one(argument, [], formats.either(ways), end))
    return elements


def _dsml(argument: Argument, is_string: str, value: Format, alphabet: Alphabet) -> Format:
    head = f'\n<{_DSML}parameter name="{argument.key}" string="{is_string}">'
    return formats.sequence(*formats.markup(alphabet, head), value)


def _one(argument: Argument, head: list[Format], value: Format, end: list[Format]) -> Format:
    whole = formats.sequence(*head, value, *end)
    return whole if argument.required else formats.optional(whole)


def _text(argument: Argument, free: Format) -> Format | None:
    """A value that stands as it is, `free` where it may be any; None for one that has to be JSON."""
    schema = argument.schema
    if argument.is_anything:
        return free
    words = argument.words
    if words is not None:
        return formats.either([formats.literal(word) for word in words])
    if schema.get("type") != "string":
        return None
    if "pattern" in schema:
        return formats.regex(schema["pattern"])
    if "minLength" in schema or "maxLength" in schema:
        return formats.regex(f"[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
    return free


def _any_tokens(alphabet: Alphabet) -> Format:
    return {"type": "any_tokens", "exclude_tokens": sorted(alphabet.ids)}
