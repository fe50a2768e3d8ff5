"""`POST /v1/chat/completions`."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.answering import Turn, begin
from quickturn.server.body import read_body
from quickturn.server.errors import invalid
from quickturn.server.fields import CommonFields, check_prompt_logprobs, check_refused, check_top_logprobs
from quickturn.server.openai_chat_reply import ChatReply
from quickturn.server.openai_format import output_param, read_output
from quickturn.server.openai_tools import read_tool_choice, read_tools
from quickturn.server.replying import answer
from quickturn.server.state import ServerState

_REFUSED = (
    "functions",
    "function_call",
    "modalities",
    "audio",
    "web_search_options",
    "continue_final_message",
    "echo",
    "documents",
    "use_beam_search",
    "best_of",
    "logits_processors",
)
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
}
_WHY = {
    "functions": "functions is not supported: use tools",
    "function_call": "function_call is not supported: use tool_choice",
    "web_search_options": "this server searches nothing; give the model a tool that does",
    "continue_final_message": "going on with the last message is not supported: end with the user's",
}


class ChatBody(CommonFields, kw_only=True):
    """The body of a chat completion; see `CommonFields` for the rest of the fields."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    continue_final_message: Any = None
    echo: Any = None
    documents: Any = None
    use_beam_search: Any = None
    best_of: Any = None
    logits_processors: Any = None

    def refused(self) -> dict[str, Any]:
        """Fields that ask for what this server doesn't do yet."""
        return {name: getattr(self, name) for name in _REFUSED}


_DECODER = msgspec.json.Decoder(ChatBody)


async def chat_completions(request: Request) -> Response:
    """Answer a chat, streamed or whole."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _DECODER, state)
    check_refused(body.refused(), _HARMLESS, _WHY)
    model = state.model_name(body.model)
    check_prompt_logprobs(body.prompt_logprobs, bool(body.stream))
    answers = await begin(request, state, lambda: turn_of(body))
    reply = ChatReply(state.tokenizer.vocabulary, answers, model, bool(body.logprobs), body.wants_usage)
    return await answer(request, answers, reply, bool(body.stream), state.limits.keepalive)


def turn_of(body: ChatBody) -> Turn:
    """What the body asks for. Raises ApiError naming the field that is wrong."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    check_top_logprobs(body.top_logprobs)
    tools = read_tools(body.tools)
    template = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            template.setdefault("enable_thinking", False)
    newer = body.max_completion_tokens is not None
    return Turn(
        messages=body.messages,
        fields=body,
        max_tokens=(body.max_completion_tokens, "max_completion_tokens")
        if newer
        else (body.max_tokens, "max_tokens"),
        tools=tools,
        tool_choice=read_tool_choice(body.tool_choice, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        template=template,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        output=read_output(body),
        output_param=output_param(body),
    )
