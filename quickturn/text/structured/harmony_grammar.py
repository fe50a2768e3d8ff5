"""Answers of gpt-oss as grammars: thinking on its channel, then text or one call on theirs."""

from collections.abc import Sequence

from quickturn.text.harmony import TOKENS
from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.structured import formats
from quickturn.text.structured.formats import Format
from quickturn.text.structured.tool_grammar import arguments_of
from quickturn.text.tools import Tool


def answer(alphabet: Alphabet, *bodies: Format) -> Format:
    """Thinking or none, then one of `bodies`, each a message of `text` or `call`."""
    thinking = formats.sequence(
        *formats.markup(alphabet, "<|channel|>analysis<|message|>"),
        _anything(alphabet),
        *formats.markup(alphabet, "<|end|><|start|>assistant"),
    )
    return formats.sequence(formats.optional(thinking), formats.either(bodies))


def text(alphabet: Alphabet, format: Format | None = None) -> Format:
    """The visible answer, in `format` or free."""
    head = formats.markup(alphabet, "<|channel|>final<|message|>")
    return formats.sequence(*head, format or _anything(alphabet))


def call(alphabet: Alphabet, tools: Sequence[Tool]) -> Format:
    """One call; it ends the answer."""
    before = formats.markup(alphabet, "<|channel|>commentary to=functions.")
    between = " <|constrain|>json<|message|>"
    calls = [
        formats.sequence(*formats.markup(alphabet, tool.name + between), arguments_of(tool)) for tool in tools
    ]
    return formats.sequence(*before, formats.either(calls))


def _anything(alphabet: Alphabet) -> Format:
    excluded = [index for index, char in alphabet.ids.items() if char in map(alphabet.spell, TOKENS)]
    return {"type": "any_tokens", "exclude_tokens": excluded}
