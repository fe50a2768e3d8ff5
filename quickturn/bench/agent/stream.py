"""Reads a streamed answer of an OpenAI-compatible server: text as it arrives, usage, errors."""

import json
from dataclasses import dataclass, field
from typing import Any

from quickturn.bench.agent.records import Record
from quickturn.bench.agent.talk import Answer


class StreamFault(Exception):
    """A stream that says it failed, or can't be read. `kind` is what it counts as."""

    def __init__(self, kind: str, detail: str, retry_after: float | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail[:400]
        self.retry_after = retry_after


@dataclass
class _Arrival:
    at: float
    events: int = 0
    length: int = 0
    told: int = 0
    """Tokens so far by a usage that came with the text; 0 where none did."""


@dataclass
class StreamReader:
    """Feed it reads with their times, then `settle` a record with what they were."""

    done: bool = False
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    _rest: bytes = b""
    _arrivals: list[_Arrival] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)

    def feed(self, at: float, data: bytes) -> None:
        """Bytes of the body that one read of the socket brought, at time `at`. Raises StreamFault."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        # One read of the socket may come in several pieces: they arrived together.
        together = bool(self._arrivals) and self._arrivals[-1].at == at
        arrival = self._arrivals[-1] if together else _Arrival(at)
        try:
            for line in lines:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), arrival)
        finally:
            if arrival.events and not together:
                self._arrivals.append(arrival)

    def settle(self, record: Record) -> Answer:
        """Write times and counts into the record; the answer as the next turn carries it. Raises StreamFault
        for a stream that ended before it said so, or without anything.
        """
        record.finish = self.finish
        record.arrivals = [arrival.at for arrival in self._arrivals]
        events = sum(arrival.events for arrival in self._arrivals)
        given = self.usage.get("completion_tokens")
        record.answer = given if isinstance(given, int) else len(self._ids) or events
        record.exact_counts, record.counts = _counts(self._arrivals, record.answer)
        record.prompt = _whole(self.usage.get("prompt_tokens"))
        details = self.usage.get("prompt_tokens_details")
        record.cached = _whole(details.get("cached_tokens")) if isinstance(details, dict) else None
        if not self.done:
            raise StreamFault("cut", "the stream ended before [DONE]")
        if not record.answer:
            raise StreamFault("empty", "the answer has neither text nor tokens")
        return Answer("".join(self._text), "".join(self._reasoning), tuple(self._ids), record.answer)

    def _event(self, data: bytes, arrival: _Arrival) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise StreamFault("error event", json.dumps(event["error"]))
            if isinstance(event.get("usage"), dict):
                self.usage = event["usage"]
            for choice in event.get("choices") or ():
                self._choice(choice, arrival)
        except (ValueError, AttributeError, TypeError) as error:
            raise StreamFault("malformed", f"{error}: {data[:200]!r}") from error

    def _choice(self, choice: dict[str, Any], arrival: _Arrival) -> None:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        calls = delta.get("tool_calls")
        self._text.append(text)
        self._reasoning.append(reasoning)
        self._ids += choice.get("token_ids") or ()
        self.finish = choice.get("finish_reason") or self.finish
        if text or reasoning or calls:
            arrival.events += 1
            arrival.length += len(text) + len(reasoning) + (len(json.dumps(calls)) if calls else 0)
            arrival.told = _whole(self.usage.get("completion_tokens")) or 0


def _counts(arrivals: list[_Arrival], tokens: int) -> tuple[bool, list[int]]:
    """Tokens in each arrival, and whether that is known.

    A token without text of its own (part of a character, the end token) shows in no event: of a stream with
    an event a token, what is over belongs to its last one.
    """
    if not arrivals:
        return True, []
    told = [arrival.told for arrival in arrivals]
    if all(told) and told == sorted(told):
        counts = [after - before for before, after in zip([0, *told], told, strict=False)]
        counts[-1] += max(0, tokens - told[-1])
        return True, counts
    events = [arrival.events for arrival in arrivals]
    over = tokens - sum(events)
    if 0 <= over <= max(1, len(events) // 50):
        events[-1] += over
        return True, events
    total = sum(arrival.length for arrival in arrivals) or 1
    counts, so_far, given = [], 0, 0
    for arrival in arrivals:
        so_far += arrival.length
        upto = round(tokens * so_far / total)
        counts.append(upto - given)
        given = upto
    return False, counts


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None
