"""From a turn, as any API states it, to its answers as typed events.

An API says how its body is read into a `Turn`, awaits `begin`, and formats what the `Generation` brings: each
piece's `content` is a list of `ReasoningDelta`, `TextDelta`, `ToolCallStart`, `ToolArgumentsDelta`,
`ToolCallEnd` and one `Finished`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.server.constraining import compiled, helpful
from quickturn.server.errors import ApiError, invalid, not_supported
from quickturn.server.fields import (
    CommonFields,
    choice_count,
    clamp_max_tokens,
    routing_of,
    sampling_params,
    seeds,
    tenant_of,
)
from quickturn.server.generation import Generation, Prompt
from quickturn.server.off_loop import prepare
from quickturn.server.state import ServerState
from quickturn.text.answer_reader import Answered, AnswerEvent, AnswerReader
from quickturn.text.chat_template import TemplateFailed
from quickturn.text.conversation import BadMessage
from quickturn.text.encoder import Encoded
from quickturn.text.parsing.parser import AnswerParser, begins_thinking
from quickturn.text.rendering import render_chat
from quickturn.text.splice import written
from quickturn.text.structured.constraint import constraint_of, helpful_constraint
from quickturn.text.structured.formats import Format
from quickturn.text.structured.schema import BadSchema
from quickturn.text.structured.tool_grammar import NoGrammar
from quickturn.text.tools import Tool

_NEVER = -1e9


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may or must call. `mode`: auto, none or required; `name`: the only one
    allowed.
    """

    mode: str = "auto"
    name: str | None = None


@dataclass(frozen=True)
class Turn:
    """What one request asks for, in no API's dialect.

    `messages` are in the form of chat templates (`text.conversation`), `fields` says how to sample,
    `template` holds variables for the chat template. `max_tokens` is what was asked for and the name of
    that field, `messages_param` the field to blame for messages that can't be rendered. `logprobs`:
    alternatives a token, None for none at all, `prompt_logprobs` the same for the prompt's. `output` is
    what the visible text has to follow (built by `server.openai_format`), `output_param` the field that
    said so.
    """

    messages: Sequence[dict[str, Any]]
    fields: CommonFields
    max_tokens: tuple[int | None, str] = (None, "max_tokens")
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_calls: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    messages_param: str = "messages"
    output: Format | None = None
    output_param: str = "response_format"

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the choice leaves."""
        if self.tool_choice.mode == "none":
            return ()
        name = self.tool_choice.name
        return self.tools if name is None else tuple(tool for tool in self.tools if tool.name == name)


Answers = Generation[list[AnswerEvent]]


@dataclass(frozen=True)
class _Prepared:
    """A rendered turn. `thinking`: its prompt leaves the answer inside of thinking."""

    prompt: Encoded
    thinking: bool
    constraint: Constraint | None


async def begin(request: Request, state: ServerState, read: Callable[[], Turn]) -> Answers:
    """Render the turn that `read` makes of the body, and submit its choices to the engine. Raises ApiError,
    or ClientGone.
    """
    tenant = tenant_of(request)
    turn, prepared = await prepare(request, lambda: _prepare(state, read(), tenant))
    if prepared.constraint is not None:
        param = "tools" if turn.output is None else turn.output_param
        await compiled(request, state, prepared.constraint, param)
    elif turn.callable_tools and not (turn.fields.ignore_eos or turn.fields.min_tokens):
        constraint = helpful_constraint(state.markup, prepared.thinking)
        if constraint is not None and helpful(state, constraint):
            prepared = replace(prepared, constraint=constraint)
    return _submit(state, turn, prepared, tenant)


def _prepare(state: ServerState, turn: Turn, tenant: str) -> tuple[Turn, _Prepared]:
    markup, choice = state.markup, turn.tool_choice
    prompt = render(state, turn, tenant)
    thinking = begins_thinking(prompt.ids, state.tokenizer, markup.format.reasoning, markup.alphabet)
    try:
        constraint = constraint_of(
            markup,
            output=turn.output,
            tools=turn.callable_tools,
            must_call=choice.mode == "required",
            single_call=not turn.parallel_calls or choice.name is not None,
            thinking=thinking,
        )
    except NoGrammar as error:
        raise not_supported("tool_choice" if choice.mode == "required" else "tools", str(error)) from error
    except BadSchema as error:
        raise ApiError(400, f"tools: {error}", param="tools", code="unsupported_schema") from error
    return turn, _Prepared(prompt, thinking, constraint)


def render(state: ServerState, turn: Turn, tenant: str = "") -> Encoded:
    """The prompt, and the positions where others are likely to part from it; answers that `tenant` got before
    are as the model wrote them. Raises ApiError for messages that can't be rendered.
    """
    if state.template is None:
        raise ApiError(
            400,
            "this model has no chat template; use /v1/completions",
            param=turn.messages_param,
            code="no_chat_template",
        )
    if len(turn.messages) > state.limits.messages:
        most = state.limits.messages
        raise invalid(turn.messages_param, f"{turn.messages_param} must hold at most {most} messages")
    definitions = [dict(tool.definition) for tool in turn.tools] or None
    try:
        return render_chat(
            state.tokenizer,
            state.template,
            list(turn.messages),
            turn.template,
            definitions,
            state.written,
            _scope(turn, tenant),
            partings=True,
        )
    except BadMessage as error:
        raise invalid(error.param, str(error)) from error
    except TemplateFailed as error:
        raise invalid(turn.messages_param, str(error)) from error


def _submit(state: ServerState, turn: Turn, prepared: _Prepared, tenant: str) -> Answers:
    """Submit every choice of a rendered turn of `tenant`. Raises ApiError for fields out of range."""
    fields, markup, prompt = turn.fields, state.markup, prepared.prompt.ids
    count = choice_count(fields)
    asked, param = turn.max_tokens
    max_tokens = clamp_max_tokens(asked, param, len(prompt), turn.messages_param, state.max_context)
    sampling = sampling_params(
        fields, state.tokenizer, state.vocab_size, max_tokens, turn.logprobs, prepared.constraint
    )
    tools = turn.callable_tools
    if turn.tools and not tools:
        sampling = _without_calls(sampling, state)

    def keep(answered: Answered) -> None:
        _keep(state, prepared.thinking, answered, _scope(turn, tenant))

    def reader(sampling: SamplingParams) -> AnswerReader:
        parser = AnswerParser(
            state.tokenizer,
            markup.format,
            markup.alphabet,
            tools=tools,
            thinking=prepared.thinking,
            skip_special=fields.skip_special_tokens is not False,
        )
        single = bool(tools) and not turn.parallel_calls
        return AnswerReader(parser, sampling, single, keep)

    choices = seeds(replace(sampling, prompt_logprobs=turn.prompt_logprobs), count)
    prompts = [Prompt(prompt, choices, prepared.prompt.places)]
    return Generation(state, prompts, reader, routing_of(fields, tenant))


def _scope(turn: Turn, tenant: str) -> str:
    """Whose texts and answers these are: what one sent, another isn't served faster."""
    return f"{tenant}/{turn.fields.cache_salt or ''}"


def _keep(state: ServerState, thinking: bool, answered: Answered, scope: str) -> None:
    """Remember an answer's own tokens for the next turn of its conversation."""
    if state.written is None:
        return
    calls = [(name, arguments) for _, name, arguments in answered.calls]
    answer = written(state.tokenizer, state.markup, answered.tokens, thinking, answered.text.strip(), calls)
    if answer is not None:
        state.written.store.keep(scope, [id for id, _, _ in answered.calls], answer)


def _without_calls(sampling: SamplingParams, state: ServerState) -> SamplingParams:
    """Tools stay in the prompt, which is in the cache; what begins a call can't be chosen."""
    openers = state.markup.format.tools.openers if state.markup.format.tools else ()
    alphabet = state.markup.alphabet
    forbidden = {
        index: _NEVER for index, char in alphabet.ids.items() if char in map(alphabet.spell, openers)
    }
    return replace(sampling, logit_bias={**sampling.logit_bias, **forbidden})
