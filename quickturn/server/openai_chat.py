"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.answering import answer, prepare
from quickturn.server.body import read_body
from quickturn.server.errors import ApiError, invalid
from quickturn.server.fields import (
    CommonFields,
    check_refused,
    choice_count,
    clamp_max_tokens,
    routing_of,
    sampling_params,
    seeds,
)
from quickturn.server.generation import Generation, Piece, Prompt
from quickturn.server.openai_objects import chat_logprobs, new_id, usage_object
from quickturn.server.state import ServerState
from quickturn.server.streaming import DONE, event_of
from quickturn.text.chat_template import TemplateFailed
from quickturn.text.conversation import BadMessage
from quickturn.text.rendering import render_chat

_REFUSED = ("tools", "tool_choice", "functions", "function_call", "response_format", "modalities", "audio")
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
_WHY = {
    "tools": "tools are not supported yet: leave out `tools`, or describe them in the messages",
    "response_format": "response_format is not supported yet beyond {'type': 'text'}",
    "tool_choice": "tool_choice needs tools, which are not supported yet",
}


class ChatBody(CommonFields, kw_only=True):
    """The body of a chat completion; see `CommonFields` for the rest of the fields."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None

    def refused(self) -> dict[str, Any]:
        """Fields that ask for what this server doesn't do yet."""
        return {name: getattr(self, name) for name in _REFUSED}


_DECODER = msgspec.json.Decoder(ChatBody)


async def chat_completions(request: Request) -> Response:
    """Answer a chat, streamed or whole."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _DECODER, state.limits.body)
    check_refused(body.refused(), _HARMLESS, _WHY)
    model = state.model_name(body.model)
    tokens = await prepare(request, lambda: _render(state, body))
    generation = _generation(state, body, tokens)
    reply = _Reply(state, body, generation, model)
    return await answer(request, generation, reply, bool(body.stream), state.limits.keepalive)


def _render(state: ServerState, body: ChatBody) -> list[int]:
    if state.template is None:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    try:
        return render_chat(state.tokenizer, state.template, body.messages, extra)
    except BadMessage as error:
        raise invalid(error.param, str(error)) from error
    except TemplateFailed as error:
        raise invalid("messages", str(error)) from error


def _generation(state: ServerState, body: ChatBody, tokens: list[int]) -> Generation:
    count = choice_count(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    if not 0 <= (body.top_logprobs or 0) <= 20:
        raise invalid("top_logprobs", f"top_logprobs must be between 0 and 20, got {body.top_logprobs}")
    asked, param = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = body.max_tokens, "max_tokens"
    max_tokens = clamp_max_tokens(asked, param, len(tokens), "messages", state.max_context)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = sampling_params(body, state.tokenizer, state.vocab_size, max_tokens, logprobs)
    return Generation(
        state,
        [Prompt(tokens, seeds(sampling, count))],
        routing_of(body),
        skip_special=body.skip_special_tokens is not False,
    )


class _Reply:
    """Writes the answers of one generation as chat objects."""

    def __init__(self, state: ServerState, body: ChatBody, generation: Generation, model: str) -> None:
        self._vocabulary = state.tokenizer.vocabulary
        self._body = body
        self._generation = generation
        self._head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": model}

    async def whole(self) -> bytes:
        """The one JSON object of an answer that isn't streamed."""
        count = self._generation.choices
        texts: list[list[str]] = [[] for _ in range(count)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        finish = [""] * count
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                texts[piece.index].append(piece.text)
                logprobs[piece.index] += self._logprob_entries(piece)
                finish[piece.index] = piece.finish
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts[index]), "refusal": None},
                "logprobs": {"content": logprobs[index], "refusal": None} if self._body.logprobs else None,
                "finish_reason": finish[index],
            }
            for index in range(count)
        ]
        usage = usage_object(self._generation.usage)
        return msgspec.json.encode(
            {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer: the role first, then text as it comes, usage if asked for,
        `[DONE]`."""
        for index in range(self._generation.choices):
            yield self._chunk(index, {"role": "assistant", "content": ""})
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                entries = self._logprob_entries(piece)
                if piece.text or entries:
                    yield self._chunk(piece.index, {"content": piece.text}, entries)
                if piece.finish:
                    yield self._chunk(piece.index, {}, finish=piece.finish)
        if self._body.wants_usage:
            usage = usage_object(self._generation.usage)
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
        if self._body.wants_usage:
            chunk["usage"] = None
        return event_of(chunk)

    def _logprob_entries(self, piece: Piece) -> list[dict[str, Any]]:
        return chat_logprobs(self._vocabulary, piece.tokens, piece.logprobs) if self._body.logprobs else []
