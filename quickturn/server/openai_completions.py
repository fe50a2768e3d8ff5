"""`POST /v1/completions`."""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.server.body import read_body
from quickturn.server.constraining import compiled
from quickturn.server.errors import invalid, not_supported
from quickturn.server.fields import (
    CommonFields,
    check_refused,
    checked_ids,
    choice_count,
    clamp_max_tokens,
    routing_of,
    sampling_params,
    seeds,
    tenant_of,
)
from quickturn.server.generation import Generation, Piece, Prompt
from quickturn.server.off_loop import prepare
from quickturn.server.openai_format import read_output
from quickturn.server.openai_objects import completion_logprobs, new_id, usage_object
from quickturn.server.replying import answer
from quickturn.server.state import ServerState
from quickturn.server.streaming import DONE, event_of
from quickturn.text.detokenizer import Detokenizer
from quickturn.text.structured.formats import source

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16

_WHY = {
    "echo": "echo is not supported yet: put the prompt and the answer together on your side",
    "suffix": "suffix is not supported: the served model completes at the end only",
}


class CompletionBody(CommonFields, kw_only=True):
    """The body of a completion; see `CommonFields` for the rest of the fields."""

    prompt: str | list[Any]
    logprobs: int | None = None
    best_of: int | None = None

    echo: Any = None
    suffix: Any = None


_DECODER = msgspec.json.Decoder(CompletionBody)


async def completions(request: Request) -> Response:
    """Continue one or several prompts, streamed or whole."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _DECODER, state)
    check_refused({"echo": body.echo, "suffix": body.suffix}, {"suffix": ("",)}, _WHY)
    if body.best_of is not None and body.best_of != choice_count(body):
        raise not_supported("best_of", "best_of is not supported: leave it out, or set it to n")
    model = state.model_name(body.model)
    output = read_output(body)
    constraint = None if output is None else Constraint(source(output))
    if constraint is not None:
        await compiled(request, state, constraint, "response_format")
    prompts = await prepare(request, lambda: _prompts(state, body, constraint))
    routing = routing_of(body, tenant_of(request))
    skip_special = body.skip_special_tokens is not False

    def reader(sampling: SamplingParams) -> Detokenizer:
        return Detokenizer(state.tokenizer, sampling, skip_special)

    generation = Generation[str](state, prompts, reader, routing)
    reply = _Reply(state, body, generation, model)
    return await answer(request, generation, reply, bool(body.stream), state.limits.keepalive)


def _prompts(state: ServerState, body: CompletionBody, constraint: Constraint | None) -> list[Prompt]:
    count = choice_count(body)
    logprobs = body.logprobs
    prompts = []
    for place, value in _split(body.prompt):
        tokens = (
            state.tokenizer.encode(value)
            if isinstance(value, str)
            else checked_ids(value, place, state.vocab_size)
        )
        if not tokens:
            raise invalid(place, f"{place} is empty: give at least one token to go on from")
        asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        max_tokens = clamp_max_tokens(asked, "max_tokens", len(tokens), place, state.max_context)
        sampling = sampling_params(body, state.tokenizer, state.vocab_size, max_tokens, logprobs, constraint)
        prompts.append(Prompt(tokens, seeds(sampling, count)))
    return prompts


def _split(prompt: str | list[Any]) -> list[tuple[str, str | list[Any]]]:
    """The prompts with their places in the body: a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    if prompt and isinstance(prompt[0], int):
        return [("prompt", prompt)]
    if not prompt or len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompt)}")
    for index, value in enumerate(prompt):
        if not isinstance(value, str | list):
            raise invalid(f"prompt[{index}]", f"prompt[{index}] must be a string or a list of token ids")
    return [(f"prompt[{index}]", value) for index, value in enumerate(prompt)]


class _Reply:
    """Writes the answers of one generation as completion objects."""

    def __init__(
        self, state: ServerState, body: CompletionBody, generation: Generation[str], model: str
    ) -> None:
        self._vocabulary = state.tokenizer.vocabulary
        self._body = body
        self._generation = generation
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets = [0] * generation.choices

    async def whole(self) -> bytes:
        """The one JSON object of an answer that isn't streamed."""
        count = self._generation.choices
        collected: list[list[Piece[str]]] = [[] for _ in range(count)]
        await self._generation.run(lambda piece: collected[piece.index].append(piece))
        choices = [self._choice(_joined(index, collected[index])) for index in range(count)]
        return msgspec.json.encode(
            {**self._head, "choices": choices, "usage": usage_object(self._generation.usage)}
        )

    def begin(self) -> bytes:
        """Nothing."""
        return b""

    def more(self, piece: Piece[str]) -> bytes:
        """The piece's text, if there is news."""
        if not (piece.content or piece.logprobs or piece.finish):
            return b""
        usage = {"usage": None} if self._body.wants_usage else {}
        return event_of({**self._head, "choices": [self._choice(piece)], **usage})

    def end(self) -> bytes:
        """Usage if asked for, and `[DONE]`."""
        if not self._body.wants_usage:
            return DONE
        return event_of({**self._head, "choices": [], "usage": usage_object(self._generation.usage)}) + DONE

    def _choice(self, piece: Piece[str]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            offset = self._offsets[piece.index]
            logprobs = completion_logprobs(self._vocabulary, piece.tokens, piece.logprobs, offset)
            self._offsets[piece.index] += sum(len(text) for text in logprobs["tokens"])
        return {
            "index": piece.index,
            "text": piece.content,
            "logprobs": logprobs,
            "finish_reason": piece.finish or None,
        }


def _joined(index: int, pieces: list[Piece[str]]) -> Piece[str]:
    return Piece(
        index=index,
        content="".join(piece.content for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        logprobs=[entry for piece in pieces for entry in piece.logprobs],
        finish=pieces[-1].finish if pieces else "",
    )
