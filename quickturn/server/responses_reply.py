"""Writes an answer as a response object, whole or as its stream of events."""

import time
from collections.abc import Callable, Iterator
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
        self._number = 0

    async def whole(self) -> bytes:
        """The response object of an answer that isn't streamed."""

        def take(piece: Piece[list[AnswerEvent]]) -> None:
            for _ in self._changes(piece):
                pass

        await self._answers.run(take)
        return msgspec.json.encode(self._ended())

    def begin(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        return b"".join(
            self._event({"type": f"response.{type}", "response": self._object("in_progress")})
            for type in ("created", "in_progress")
        )

    def more(self, piece: Piece[list[AnswerEvent]]) -> bytes:
        """What the piece changes in the output items."""
        return b"".join(map(self._event, self._changes(piece)))

    def end(self) -> bytes:
        """The whole response, completed or incomplete."""
        response = self._ended()
        return self._event({"type": f"response.{response['status']}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a response that went wrong."""
        wrong = {"code": error.code or "server_error", "message": error.message}
        return self._event({"type": "response.failed", "response": self._object("failed", error=wrong)})

    def _event(self, fields: Event) -> bytes:
        """An event with the next sequence number; they rise from 0."""
        numbered = {**fields, "sequence_number": self._number}
        self._number += 1
        return named_event(numbered)

    def _changes(self, piece: Piece[list[AnswerEvent]]) -> Iterator[Event]:
        self._count_reasoning(piece)
        entries = self._logprob_entries(piece)
        for item in piece.content:
            if isinstance(item, Finished):
                self._finished = item
            yield from self._output.add(item, entries if isinstance(item, TextDelta) else ())
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
