"""`POST /v1/completions`."""

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.server.body import read_body
from quickturn.server.completion_reply import Asked, CompletionReply
from quickturn.server.constraining import compiled
from quickturn.server.errors import invalid, not_supported
from quickturn.server.fields import (
    CommonFields,
    check_prompt_logprobs,
    check_refused,
    checked_ids,
    choice_count,
    clamp_max_tokens,
    routing_of,
    sampling_params,
    seeds,
    tenant_of,
)
from quickturn.server.generation import Generation, Prompt
from quickturn.server.off_loop import prepare
from quickturn.server.openai_format import output_param, read_output
from quickturn.server.replying import answer
from quickturn.server.state import ServerState
from quickturn.text.detokenizer import Detokenizer
from quickturn.text.structured.formats import source

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16

_WHY = {
    "suffix": "suffix is not supported: the served model completes at the end only",
}


class CompletionBody(CommonFields, kw_only=True):
    """The body of a completion; see `CommonFields` for the rest of the fields."""

    prompt: str | list[Any]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None

    suffix: Any = None


_DECODER = msgspec.json.Decoder(CompletionBody)


async def completions(request: Request) -> Response:
    """Continue one or several prompts, streamed or whole."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _DECODER, state)
    check_refused({"suffix": body.suffix}, {"suffix": ("",)}, _WHY)
    check_prompt_logprobs(body.prompt_logprobs, bool(body.stream))
    if body.best_of is not None and body.best_of != choice_count(body):
        raise not_supported("best_of", "best_of is not supported: leave it out, or set it to n")
    model = state.model_name(body.model)
    output = read_output(body)
    constraint = None if output is None else Constraint(source(output))
    if constraint is not None:
        await compiled(request, state, constraint, output_param(body))
    prompts = await prepare(request, lambda: _prompts(state, body, constraint))
    routing = routing_of(body, tenant_of(request))
    skip_special = body.skip_special_tokens is not False

    def reader(sampling: SamplingParams) -> Detokenizer:
        return Detokenizer(state.tokenizer, sampling, skip_special)

    generation = Generation[str](state, prompts, reader, routing)
    asked = Asked(
        logprobs=body.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        no_answer=body.max_tokens == 0,
        wants_usage=body.wants_usage,
        skip_special=skip_special,
    )
    texts = [_text(value) for _, value in _split(body.prompt)] if body.echo else None
    reply = CompletionReply(state.tokenizer, generation, model, asked, texts)
    return await answer(request, generation, reply, bool(body.stream), state.limits.keepalive)


def _prompts(state: ServerState, body: CompletionBody, constraint: Constraint | None) -> list[Prompt]:
    count = choice_count(body)
    logprobs, scored = body.logprobs, _scored(body)
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
        if asked == 0 and body.echo:
            asked = 1  # generated, and not shown
        max_tokens = clamp_max_tokens(asked, "max_tokens", len(tokens), place, state.max_context)
        sampling = sampling_params(body, state.tokenizer, state.vocab_size, max_tokens, logprobs, constraint)
        prompts.append(Prompt(tokens, seeds(replace(sampling, prompt_logprobs=scored), count)))
    return prompts


def _scored(body: CompletionBody) -> int | None:
    """Alternatives for each token of the prompts; None if nobody wants to know of them."""
    echoed = body.logprobs if body.echo else None
    asked = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    return max(asked, default=None)


def _text(prompt: str | list[Any]) -> str | None:
    return prompt if isinstance(prompt, str) else None


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
