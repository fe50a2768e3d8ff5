"""The markup of one model's answers, chosen by its chat template or by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from quickturn.text import harmony, reasoning, tool_calls
from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.parsing.formats import AnswerFormat
from quickturn.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
HARMONY = "gpt_oss"
_HARMONY_SIGNS = (harmony.CHANNEL, harmony.MESSAGE, "analysis")
Format = TypeVar("Format")


@dataclass(frozen=True)
class AnswerMarkup:
    """A model's answer format, and its control tokens as the parsers see them."""

    format: AnswerFormat
    alphabet: Alphabet


def choose_format(template: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerFormat:
    """The format of a model with this chat template. A name that isn't 'auto' wins over the template; 'none'
    means that answers are taken as text. Raises ValueError for an unknown name.
    """
    if HARMONY in (tool_parser, reasoning_parser) or (
        tool_parser == reasoning_parser == AUTO and all(sign in template for sign in _HARMONY_SIGNS)
    ):
        return harmony.FORMAT
    tools = _named(tool_calls.FORMATS, tool_parser, "tool call")
    thinking = _named(reasoning.FORMATS, reasoning_parser, "reasoning")
    return AnswerFormat(
        tools=tool_calls.detect(template) if tool_parser == AUTO else tools,
        reasoning=reasoning.detect(template) if reasoning_parser == AUTO else thinking,
    )


def markup_of(tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> AnswerMarkup:
    """The markup of a loaded model; see `choose_format`."""
    format = choose_format(tokenizer.chat_template or "", tool_parser, reasoning_parser)
    return AnswerMarkup(format, Alphabet.of(tokenizer, format.control_tokens))


def parser_names(formats: Mapping[str, object]) -> list[str]:
    """What `--tool-call-parser` or `--reasoning-parser` may name."""
    return [AUTO, NONE, HARMONY, *sorted(formats)]


def _named(formats: dict[str, Format], name: str, kind: str) -> Format | None:
    if name in (AUTO, NONE):
        return None
    if name not in formats:
        raise ValueError(
            f"there is no {kind} parser {name!r}; choose one of {', '.join(parser_names(formats))}"
        )
    return formats[name]
