"""The markup of one model's answers, chosen by its chat template or by name."""

from dataclasses import dataclass
from typing import TypeVar

from quickturn.text import reasoning, tool_calls
from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.parsing.formats import AnswerFormat
from quickturn.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
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


def _named(formats: dict[str, Format], name: str, kind: str) -> Format | None:
    if name in (AUTO, NONE):
        return None
    if name not in formats:
        raise ValueError(f"there is no {kind} parser {name!r}; choose one of {', '.join(sorted(formats))}")
    return formats[name]
