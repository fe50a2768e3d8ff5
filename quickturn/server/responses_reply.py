"""Writes an answer as a response object, whole or as its stream of events."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import msgspec

from quickturn.server.answering import Answers
from quickturn.server.errors import ApiError
from quickturn.server.generation import Piece, Usage
from quickturn.server.openai_objects import chat_logprobs
from quickturn.server.responses_output import Event, Output
from quickturn.server.streaming import named_event
from quickturn.text.answer_reader import AnswerEvent, Finished
from quickturn.text.parsing.events import ReasoningDelta, TextDelta
from quickturn.text.vocabulary import Vocabulary


class ResponseReply:
    """The one answer of a Responses request as the API's objects. `echo`: the fields of the request that its
    response repeats, `id` among them; `keep` is called with a response that ended well and its output items.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        answers: Answers,
        echo: Event,
        logprobs: bool,
        keep: Callable[[Event], None],
    ) -> None:
        self._vocabulary = vocabulary
        self._answers = answers
        self._echo = {**echo, "object": "response", "created_at": int(time.time())}
        self._logprobs = logprobs
        self._keep = keep
        self._output = Output()
        self._finished = Finished("stop")
        self._reasoning_tokens = 0

    async def whole(self) -> bytes:
        """The response object of an answer that isn't streamed."""
        async with aclosing(self._changes()) as changes:
            async for _ in changes:
                pass
        return msgspec.json.encode(self._ended())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer, their sequence numbers rising from 0."""
        number = 0

        def event(fields: Event) -> bytes:
            nonlocal number
            numbered = {**fields, "sequence_number": number}
            number += 1
            return named_event(numbered)

        yield event({"type": "response.created", "response": self._object("in_progress")})
        yield event({"type": "response.in_progress", "response": self._object("in_progress")})
        try:
            async with aclosing(self._changes()) as changes:
                async for change in changes:
                    yield event(change)
        except ApiError as error:
            wrong = {"code": error.code or "server_error", "message": error.message}
            yield event({"type": "response.failed", "response": self._object("failed", error=wrong)})
            return
        response = self._ended()
        yield event({"type": f"response.{response['status']}", "response": response})

    async def _changes(self) -> AsyncGenerator[Event, None]:
        async with aclosing(self._answers.pieces()) as pieces:
            async for piece in pieces:
                self._count_reasoning(piece)
                entries = self._logprob_entries(piece)
                for item in piece.content:
                    if isinstance(item, Finished):
                        self._finished = item
                    for change in self._output.add(item, entries if isinstance(item, TextDelta) else ()):
                        yield change
                    entries = [] if isinstance(item, TextDelta) else entries

    def _count_reasoning(self, piece: Piece[list[AnswerEvent]]) -> None:
        """Tokens that came together are counted as what they brought last."""
        if piece.content and isinstance(piece.content[-1], ReasoningDelta):
            self._reasoning_tokens = self._answers.usage.completion

    def _logprob_entries(self, piece: Piece[list[AnswerEvent]]) -> list[Event]:
        return chat_logprobs(self._vocabulary, piece.tokens, piece.logprobs) if self._logprobs else []

    def _ended(self) -> Event:
        """The final object, which is kept for those that go on from it."""
        cut = self._finished.reason == "length"
        response = self._object("incomplete" if cut else "completed", usage=self._usage(self._answers.usage))
        if cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._keep(response)
        return response

    def _object(self, status: str, error: Event | None = None, usage: Event | None = None) -> Event:
        return {
            **self._echo,
            "status": status,
            "error": error,
            "incomplete_details": None,
            "output": list(self._output.items),
            "usage": usage,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }
