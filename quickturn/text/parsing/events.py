"""What an answer is made of, in no API's dialect. Every API formats these."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers or calls; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the visible answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. `call` counts the calls of one answer from 0; `id` is unique over all answers."""

    call: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """More of the call's arguments, as JSON text; never empty. All of them joined are one JSON object."""

    call: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The call's arguments are whole, or the answer was cut within them."""

    call: int


ParsedEvent = ReasoningDelta | TextDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
