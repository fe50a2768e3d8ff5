"""Writes answers as chat completion objects, whole or in chunks."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quickturn.engine.prompt_scores import ScoredPrompt
from quickturn.server.answering import Answers
from quickturn.server.generation import Piece
from quickturn.server.openai_objects import chat_logprobs, new_id, prompt_logprobs, usage_object
from quickturn.server.streaming import DONE, Frame, event_of
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
        self._frames: dict[int, Frame] = {}
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    async def whole(self) -> bytes:
        """The one JSON object of an answer that isn't streamed."""
        choices = [_Choice() for _ in range(self._answers.choices)]
        scored = ScoredPrompt()

        def take(piece: Piece[list[AnswerEvent]]) -> None:
            if piece.scores is not None:
                scored.add(piece.scores)
            choice = choices[piece.index]
            for event in piece.content:
                choice.add(event)
            choice.logprobs += self._logprob_entries(piece)

        await self._answers.run(take)
        objects = [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._logprobs else None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        answer: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": objects,
            "usage": usage_object(self._answers.usage),
        }
        (prompt,) = self._answers.prompts
        if prompt.sampling[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                self._vocabulary, prompt.tokens, scored.logprobs, scored.ranks
            )
        return msgspec.json.encode(answer)

    def begin(self) -> bytes:
        """The role of each choice."""
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, role) for index in range(self._answers.choices))

    def more(self, piece: Piece[list[AnswerEvent]]) -> bytes:
        """Deltas, and the reason of the end."""
        if not self._logprobs and len(piece.content) == 1 and isinstance(piece.content[0], TextDelta):
            return self._text(piece.index).fill(piece.content[0].text)
        entries = self._logprob_entries(piece)
        chunks = []
        for event in piece.content:
            if (delta := _delta(event)) is not None:
                chunks.append(self._chunk(piece.index, delta, entries))
                entries = []
        if entries:
            chunks.insert(0, self._chunk(piece.index, {}, entries))
        last = piece.content[-1] if piece.content else None
        if isinstance(last, Finished):
            chunks.append(self._chunk(piece.index, {}, finish=last.reason))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def end(self) -> bytes:
        """Usage if asked for, and `[DONE]`."""
        if not self._wants_usage:
            return DONE
        usage = usage_object(self._answers.usage)
        return (
            event_of({**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage}) + DONE
        )

    def _text(self, index: int) -> Frame:
        frame = self._frames.get(index)
        if frame is None:
            frame = self._frames[index] = Frame(lambda text: self._chunk(index, {"content": text}))
        return frame

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
