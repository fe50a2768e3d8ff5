"""One running answer: tokens in, typed events and the reason of its end out."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from quickturn.sampling_params import SamplingParams
from quickturn.text.parsing.events import (
    ParsedEvent,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from quickturn.text.parsing.parser import AnswerParser
from quickturn.text.stop import StopStrings


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. `reason`: stop, length, or tool_calls (if and only if there are calls and nothing was
    cut). `stop_string`: the one that ended the answer.
    """

    reason: str
    stop_string: str | None = None


AnswerEvent = ParsedEvent | Finished


class NewEvents(NamedTuple):
    """News of an answer, how many of the pushed tokens count, and why it ended ('' while it runs).

    `stopped_here`: it was ended on this side, so that the engine still has to be told.
    """

    content: list[AnswerEvent]
    tokens: int
    finish: str = ""
    stopped_here: bool = False


@dataclass
class Answered:
    """A whole answer. `tokens`: all but the one that ended it; `texts`: the pieces of its visible text;
    `calls`: id, name, arguments.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    texts: list[str] = field(default_factory=list)
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The visible text."""
        return "".join(self.texts)

    def add(self, events: Sequence[AnswerEvent]) -> None:
        """Take in what was read."""
        for event in events:
            if isinstance(event, TextDelta):
                self.texts.append(event.text)
            elif isinstance(event, ToolCallStart):
                self.calls.append((event.id, event.name, ""))
            elif isinstance(event, ToolArgumentsDelta):
                id, name, arguments = self.calls[-1]
                self.calls[-1] = id, name, arguments + event.text


class AnswerReader:
    """Parses an answer, and looks for stop strings in its visible text: never in reasoning or in calls.

    The law: the events joined are the same however the tokens were cut into pushes.
    """

    def __init__(
        self,
        parser: AnswerParser,
        sampling: SamplingParams,
        single_call: bool = False,
        on_end: Callable[["Answered"], None] | None = None,
    ) -> None:
        """`single_call`: the answer ends with its first tool call. `on_end` gets an answer that the model
        ended by itself.
        """
        self._answered = None if on_end is None else Answered()
        self._on_end = on_end
        self._parser = parser
        self._stop = StopStrings(sampling.stop, sampling.include_stop_str)
        self._single_call = single_call
        self._one_by_one = bool(sampling.stop) or single_call
        self._hidden = (
            frozenset(sampling.stop_token_ids) if not sampling.include_stop_str else frozenset[int]()
        )

    def push(self, tokens: Sequence[int], finish: str = "") -> NewEvents:
        """The events of the next `tokens`; with `finish` ('stop', 'length', ...) they are the last."""
        shown = tokens[:-1] if finish == "stop" and tokens and tokens[-1] in self._hidden else tokens
        events: list[AnswerEvent] = []
        if self._answered is not None:
            self._answered.tokens.extend(shown)
        if not self._one_by_one:
            events += self._parser.push(shown)
        else:
            for count, token in enumerate(shown, 1):
                if self._take(self._parser.push((token,)), events):
                    return self._ended(events, count, "stop", stopped_here=not finish)
        if finish:
            self._take(self._parser.finish(finish), events)
            self._flush(events)
        if self._answered is not None:
            self._answered.add(events)
        if not finish:
            return NewEvents(events, len(tokens))
        if finish == "stop" and self._answered is not None and self._on_end is not None:
            self._on_end(self._answered)
        return self._ended(events, len(tokens), finish, stopped_here=False)

    def _take(self, parsed: list[ParsedEvent], events: list[AnswerEvent]) -> bool:
        """Move `parsed` to `events` as far as the answer goes; returns whether it ends there."""
        for event in parsed:
            if isinstance(event, TextDelta):
                text = self._stop.push(event.text)
                if text:
                    events.append(TextDelta(text))
                if self._stop.found is not None:
                    return True
            else:
                self._flush(events)
                events.append(event)
                if self._single_call and isinstance(event, ToolCallEnd):
                    return True
        return False

    def _flush(self, events: list[AnswerEvent]) -> None:
        """A stop string can't go on behind something that isn't text."""
        held = self._stop.flush()
        if held:
            events.append(TextDelta(held))

    def _ended(self, events: list[AnswerEvent], tokens: int, finish: str, stopped_here: bool) -> NewEvents:
        reason = "tool_calls" if finish == "stop" and self._parser.calls else finish
        events.append(Finished(reason, self._stop.found))
        return NewEvents(events, tokens, reason, stopped_here)
