"""Writes an answer as Anthropic's message object, whole or as its stream of events."""

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from quickturn.server.answering import Answers
from quickturn.server.errors import ApiError, anthropic_body
from quickturn.server.generation import Piece, Usage
from quickturn.server.openai_objects import new_id
from quickturn.server.streaming import StreamDialect, named_event
from quickturn.text.answer_reader import AnswerEvent, Finished
from quickturn.text.parsing.events import (
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)

Event = dict[str, Any]


class Blocks:
    """Answer events as the events of content blocks, one block open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""
        self._thinking = hashlib.blake2b(digest_size=16)

    def add(self, event: AnswerEvent) -> Iterator[Event]:
        """The block events of `event`; what is still open ends with the answer."""
        if isinstance(event, ReasoningDelta):
            yield from self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.update(event.text.encode())
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, TextDelta):
            yield from self._open("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, ToolCallStart):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            yield from self._open(event.id, block)
        elif isinstance(event, ToolArgumentsDelta):
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
        elif isinstance(event, ToolCallEnd | Finished):
            yield from self._close()

    def _open(self, kind: str, block: Event) -> Iterator[Event]:
        if self._kind == kind:
            return
        yield from self._close()
        self._index += 1
        self._kind = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Event]:
        if not self._kind:
            return
        if self._kind == "thinking":
            # Clients send thinking back only with a signature; ours says nothing and is never checked.
            yield self._delta({"type": "signature_delta", "signature": self._thinking.hexdigest()})
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessageReply:
    """The one answer of a Messages request as the API's objects."""

    def __init__(self, answers: Answers, model: str) -> None:
        self._answers = answers
        self._model = model
        self._blocks = Blocks()
        self._begun = False

    async def whole(self) -> bytes:
        """The message object of an answer that isn't streamed."""
        content: list[Event] = []
        finished = Finished("stop")

        def take(piece: Piece[list[AnswerEvent]]) -> None:
            nonlocal finished
            for event in piece.content:
                for change in self._blocks.add(event):
                    apply(change, content)
                if isinstance(event, Finished):
                    finished = event

        await self._answers.run(take)
        usage = self._answers.usage
        message = {
            **self._head(),
            "content": content,
            **_stop(finished),
            "usage": {**_input(usage), "output_tokens": usage.completion},
        }
        return msgspec.json.encode(message)

    def begin(self) -> bytes:
        """Nothing: `message_start` tells what was cached, which the first piece brings."""
        return b""

    def more(self, piece: Piece[list[AnswerEvent]]) -> bytes:
        """`message_start`, content blocks as they form, `message_delta`."""
        changes = []
        if not self._begun:
            self._begun = True
            changes.append(self._start())
        for event in piece.content:
            changes += map(named_event, self._blocks.add(event))
            if isinstance(event, Finished):
                usage = {"output_tokens": self._answers.usage.completion}
                changes.append(named_event({"type": "message_delta", "delta": _stop(event), "usage": usage}))
        return b"".join(changes)

    def end(self) -> bytes:
        """`message_stop`."""
        return named_event({"type": "message_stop"})

    def _start(self) -> bytes:
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input(self._answers.usage), "output_tokens": 0},
        }
        return named_event({"type": "message_start", "message": message})

    def _head(self) -> Event:
        return {"id": new_id("msg"), "type": "message", "role": "assistant", "model": self._model}


def apply(change: Event, content: list[Event]) -> None:
    """Do to the blocks of `content` what a client does when it reads `change`."""
    match change["type"]:
        case "content_block_start":
            block = change["content_block"]
            content.append({**block, "input": ""} if block["type"] == "tool_use" else dict(block))
        case "content_block_delta":
            block, delta = content[-1], change["delta"]
            key = {"input_json_delta": ("input", "partial_json")}.get(delta["type"])
            name = delta["type"].removesuffix("_delta")
            mine, theirs = key or (name, name)
            block[mine] += delta[theirs]
        case "content_block_stop" if content[-1]["type"] == "tool_use":
            content[-1]["input"] = _object(content[-1]["input"])


def _error_event(error: ApiError) -> bytes:
    return named_event(anthropic_body(error))


DIALECT = StreamDialect(named_event({"type": "ping"}), _error_event)


def _object(arguments: str) -> Any:
    """Arguments as the object that they are; an answer that was cut within them has none, nor do those that
    nest too deeply for anybody to read.
    """
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}


def _stop(finished: Finished) -> Event:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = "stop_sequence" if finished.stop_string is not None else reasons.get(finished.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": finished.stop_string}


def _input(usage: Usage) -> Event:
    """Input tokens as this API counts them: those read from the cache apart. Everything computed may be read
    again, so nothing is marked as written for later.
    """
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
    }
