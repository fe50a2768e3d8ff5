"""What a parser of one model family's markup consists of."""

from collections.abc import Callable
from dataclasses import dataclass

from quickturn.text.parsing.output import Output, long_id
from quickturn.text.parsing.reader import Reader, Steps


@dataclass(frozen=True)
class Parsing:
    """One answer that is being parsed. `spell` turns markup into what the reader sees of it."""

    reader: Reader
    out: Output
    spell: Callable[[str], str]

    def on(self, out: Output) -> "Parsing":
        """The same with another output."""
        return Parsing(self.reader, out, self.spell)


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    `tokens`: its control tokens, recognised by id where the vocabulary has them. `openers`: what begins a
    section of calls. `section(parsing, opener)` reads on behind an opener up to the section's end. `first`:
    the characters that may follow an opener and white space (None: any). `closer`: what ends a section, if
    something does. `at_start`: tried once where the
    answer's text begins, for formats without an opener; returns whether it took a call.
    """

    name: str
    openers: tuple[str, ...]
    section: Callable[[Parsing, str], Steps[None]]
    tokens: frozenset[str] = frozenset()
    first: str | None = None
    closer: str = ""
    new_id: Callable[[], str] = long_id
    at_start: Callable[[Parsing], Steps[bool]] | None = None


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model writes what it thinks: between `open` and `close`. `starts_open`: its answers begin inside,
    whatever the prompt says.
    """

    name: str
    open: str
    close: str
    starts_open: bool = False


@dataclass(frozen=True)
class AnswerFormat:
    """How a model's whole answer is written; None: it does neither. `whole`: a parser for answers that are
    made of channels, in place of the two.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    whole: Callable[[Parsing], Steps[None]] | None = None
    tokens: frozenset[str] = frozenset()

    @property
    def control_tokens(self) -> frozenset[str]:
        """Token texts that the parsers recognise by id."""
        found = set(self.tokens)
        if self.tools is not None:
            found |= self.tools.tokens
        if self.reasoning is not None:
            found |= {self.reasoning.open, self.reasoning.close}
        return frozenset(found)
