"""Where parsers put what they find; joined to as few events as possible when it is collected."""

import json
import secrets
import string
from collections.abc import Callable
from typing import Any

from quickturn.text.parsing.alphabet import Alphabet
from quickturn.text.parsing.events import (
    ParsedEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from quickturn.text.parsing.reader import SPACE
from quickturn.text.tools import Tool, argument_types, value_fits

_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    """A call id as the OpenAI API has them."""
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


class Output:
    """Collects the events of one answer."""

    def __init__(
        self,
        alphabet: Alphabet,
        tools: tuple[Tool, ...] = (),
        new_id: Callable[[], str] = long_id,
        show_hidden: bool = False,
        trim: bool = False,
    ) -> None:
        """`trim`: white space before a tool call and behind reasoning is markup, not text."""
        self.tools = {tool.name: tool for tool in tools}
        self.calls = 0
        self.wrote_text = False
        self.alphabet = alphabet
        self.new_id = new_id
        self._show_hidden = show_hidden
        self._trim = trim
        self._space = ""
        self._at_start = False
        self._thought_space: str | None = None
        self._open: int | None = None
        self._wrote_arguments = False
        self._events: list[ParsedEvent] = []

    def collect(self) -> list[ParsedEvent]:
        """The events since the last time, neighbours of one kind joined."""
        events, self._events = self._events, []
        return _joined(events) if len(events) > 1 else events

    def peek(self) -> list[ParsedEvent]:
        """The events since the last `collect`, which stay."""
        return list(self._events)

    def reasoning(self, text: str) -> None:
        """More thinking; line breaks at its ends are markup."""
        text = self.alphabet.read(text, self._show_hidden)
        if self._thought_space is None:
            text = text.lstrip("\n")
            self._thought_space = "" if text else None
        if not text:
            return
        text = (self._thought_space or "") + text
        kept = text.rstrip("\n")
        self._thought_space = text[len(kept) :]
        if kept:
            self._events.append(ReasoningDelta(kept))

    def end_reasoning(self) -> None:
        """Thinking is over; another one may follow."""
        self._thought_space = None
        self._at_start = True

    def text(self, text: str) -> None:
        """More of the visible answer."""
        text = self.alphabet.read(text, self._show_hidden)
        if self._at_start:
            text = text.lstrip(SPACE)
            self._at_start = not text
        text = self._space + text
        kept = text.rstrip(SPACE) if self._trim else text
        self._space = text[len(kept) :]
        if kept:
            self.wrote_text = True
            self._events.append(TextDelta(kept))

    def start_call(self, name: str, id: str = "") -> None:
        """A call of the tool `name` begins."""
        self.end_call()
        self._space = ""
        self._at_start = True
        self._open = self.calls
        self._wrote_arguments = False
        self.calls += 1
        self._events.append(ToolCallStart(self._open, id or self.new_id(), name.strip()))

    def arguments(self, text: str) -> None:
        """More of the open call's arguments, as JSON text."""
        text = self.alphabet.read(text, True)
        if text and self._open is not None:
            self._wrote_arguments = True
            self._events.append(ToolArgumentsDelta(self._open, text))

    def end_call(self) -> None:
        """The open call, if any, is whole; without arguments it gets `{}`."""
        if self._open is None:
            return
        if not self._wrote_arguments:
            self._events.append(ToolArgumentsDelta(self._open, "{}"))
        self._events.append(ToolCallEnd(self._open))
        self._open = None

    def adopt(self, other: "Output") -> None:
        """Take over the calls that another output collected while it wasn't sure that they are calls."""
        self._events += other.collect()
        self.calls += other.calls

    def finish(self) -> None:
        """The answer is over: what was held back comes out."""
        self.end_call()
        if self._space and not self.calls:
            self._events.append(TextDelta(self._space))
        self._space = ""


class ArgumentWriter:
    """Writes a call's arguments as one JSON object from keys and untyped texts, string values as they
    come.
    """

    def __init__(self, output: Output, name: str) -> None:
        self._output = output
        self._tool = output.tools.get(name.strip())
        self.alphabet = output.alphabet
        self._count = 0

    def is_string(self, key: str) -> bool:
        """Whether the argument can be nothing but a string."""
        return argument_types(self._tool, key) == {"string"}

    def key(self, key: str) -> None:
        """Begin the argument `key`."""
        head = "{" if self._count == 0 else ", "
        self._count += 1
        self._output.arguments(f"{head}{_quoted(self.alphabet.read(key, True))}: ")

    def begin_string(self) -> None:
        """The value is a string whose pieces follow."""
        self._output.arguments('"')

    def piece(self, text: str) -> None:
        """A piece of a string value."""
        self._output.arguments(_quoted(self.alphabet.read(text, True))[1:-1])

    def end_string(self) -> None:
        """The string is whole."""
        self._output.arguments('"')

    def value(self, key: str, text: str) -> None:
        """A whole value that the model wrote without saying its type: the schema decides, else JSON if it is
        some.
        """
        self._output.arguments(typed_json(self.alphabet.read(text, True), argument_types(self._tool, key)))

    def json_value(self, key: str, text: str) -> None:
        """A whole value that the model said is JSON; taken as one of any type where it isn't."""
        text = self.alphabet.read(text, True)
        if is_json(text):
            self._output.arguments(text.strip())
        else:
            self.value(key, text)

    def end(self) -> None:
        """All arguments are there."""
        if self._count:
            self._output.arguments("}")


_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


def typed_json(text: str, types: frozenset[str]) -> str:
    """JSON for `text`, which stands for a value of one of `types` (empty: not known)."""
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    try:
        value: Any = json.loads(bare, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _quoted(text)
    return _quoted(text) if isinstance(value, str) or not value_fits(value, types) else bare


def is_json(text: str) -> bool:
    """Whether `text` is a JSON value."""
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return False
    return True


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _joined(events: list[ParsedEvent]) -> list[ParsedEvent]:
    result: list[ParsedEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ToolArgumentsDelta) and isinstance(last, ToolArgumentsDelta):
            result[-1] = ToolArgumentsDelta(last.call, last.text + event.text)
        else:
            result.append(event)
    return result
