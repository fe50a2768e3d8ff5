"""Writes answers as chat completion objects, whole or in chunks."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quickturn.server.answering import Answers
from quickturn.server.generation import Piece
from quickturn.server.openai_objects import chat_logprobs, new_id, usage_object
from quickturn.server.streaming import DONE, event_of
from quickturn.text.answer_reader import AnswerEvent, Finished
from quickturn.text.parsing.events import (
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)
from quickturn.text.vocabulary import Vocabulary


@dataclass
class _Choice:
    """What one choice has become so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str = ""

    def add(self, event: AnswerEvent) -> None:
        if isinstance(event, TextDelta):
            self.text.append(event.text)
        elif isinstance(event, ReasoningDelta):
            self.reasoning.append(event.text)
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            self.calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, ToolArgumentsDelta):
            self.calls[event.call]["function"]["arguments"] += event.text
        elif isinstance(event, Finished):
            self.finish = event.reason

    def message(self) -> dict[str, Any]:
        """The message object; without text beside calls `content` is null."""
        text = "".join(self.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not (self.calls or self.reasoning) else None,
            "refusal": None,
        }
        if self.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatReply:
    """The answers of one chat request as the API's objects."""

    def __init__(
        self, vocabulary: Vocabulary, answers: Answers, model: str, logprobs: bool, wants_usage: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._answers = answers
        self._logprobs = logprobs
        self._wants_usage = wants_usage
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    async def whole(self) -> bytes:
        """The one JSON object of an answer that isn't streamed."""
        choices = [_Choice() for _ in range(self._answers.choices)]
        async with aclosing(self._answers.pieces()) as pieces:
            async for piece in pieces:
                choice = choices[piece.index]
                for event in piece.content:
                    choice.add(event)
                choice.logprobs += self._logprob_entries(piece)
        objects = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        usage = usage_object(self._answers.usage)
        return msgspec.json.encode(
            {**self._head, "object": "chat.completion", "choices": objects, "usage": usage}
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer: the role first, then deltas as they come, usage if asked for,
        `[DONE]`."""
        for index in range(self._answers.choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async with aclosing(self._answers.pieces()) as pieces:
            async for piece in pieces:
                entries = self._logprob_entries(piece)
                deltas = [delta for event in piece.content if (delta := _delta(event)) is not None]
                if entries and not deltas:
                    deltas = [{}]
                for delta in deltas:
                    yield self._chunk(piece.index, delta, entries)
                    entries = []
                last = piece.content[-1] if piece.content else None
                if isinstance(last, Finished):
                    yield self._chunk(piece.index, {}, finish=last.reason)
        if self._wants_usage:
            usage = usage_object(self._answers.usage)
            yield event_of({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        entries: list[dict[str, Any]] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": entries, "refusal": None} if entries else None,
            "finish_reason": finish,
        }
        chunk: dict[str, Any] = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return event_of(chunk)

    def _logprob_entries(self, piece: Piece[list[AnswerEvent]]) -> list[dict[str, Any]]:
        return chat_logprobs(self._vocabulary, piece.tokens, piece.logprobs) if self._logprobs else []


def _delta(event: AnswerEvent) -> dict[str, Any] | None:
    """The `delta` of one event; None for an event that this API doesn't show."""
    if isinstance(event, TextDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, ToolCallStart):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.call, "id": event.id, "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(event, ToolArgumentsDelta):
        return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
    return None
