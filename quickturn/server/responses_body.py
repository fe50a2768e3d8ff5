"""Bodies of the Responses API, and the turn that they ask for."""

from typing import Any

import msgspec

from quickturn.server.answering import ToolChoice, Turn
from quickturn.server.errors import invalid
from quickturn.server.fields import CommonFields, StreamOptions, check_refused, check_top_logprobs
from quickturn.server.openai_format import read_response_format
from quickturn.server.openai_tools import MAX_TOOLS, chosen, read_function
from quickturn.server.responses_items import Item, chat_messages
from quickturn.text.tools import Tool

_REFUSED = ("background", "conversation", "prompt")
_TEXT = {"format": {"type": "text"}}
_LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(msgspec.Struct, kw_only=True):
    """The body of a response. Unknown fields are ignored, as are tools of kinds that run at OpenAI's."""

    model: str | None = None
    input: str | list[Any] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    seed: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    background: Any = None
    conversation: Any = None
    prompt: Any = None

    @property
    def logprobs(self) -> int | None:
        """Alternatives a token, None for no log probabilities."""
        wanted = self.top_logprobs or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if wanted else None


def response_turn(body: ResponsesBody, items: list[Item]) -> Turn:
    """What the body asks for behind `items`, the conversation so far with the body's own input. Raises
    ApiError.
    """
    check_refused({name: getattr(body, name) for name in _REFUSED}, {}, {})
    output = read_response_format((body.text or _TEXT).get("format"), "text.format")
    check_top_logprobs(body.top_logprobs)
    tools = read_tools(body.tools)
    template = dict(body.chat_template_kwargs or {})
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        template.setdefault("reasoning_effort", effort)
        template.setdefault("enable_thinking", effort != "none")
    fields = CommonFields(
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        prompt_cache_key=body.prompt_cache_key,
        cache_salt=body.cache_salt,
        priority=body.priority,
    )
    return Turn(
        messages=chat_messages(body.instructions, items),
        fields=fields,
        max_tokens=(body.max_output_tokens, "max_output_tokens"),
        tools=tools,
        tool_choice=_tool_choice(body.tool_choice, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        template=template,
        logprobs=body.logprobs,
        messages_param="input",
        output=output,
        output_param="text.format",
    )


def echo(body: ResponsesBody, id: str, model: str) -> dict[str, Any]:
    """The fields of the request that its response repeats."""
    return {
        "id": id,
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": body.text or _TEXT,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def read_tools(tools: list[Any] | None) -> tuple[Tool, ...]:
    """The client's own functions; tools of other kinds are left out. Raises ApiError naming the one that is
    wrong.
    """
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools must hold at most {MAX_TOOLS} tools")
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        place = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise invalid(place, f"{place} must be an object")
        if tool.get("type") != "function":
            continue
        read = read_function(tool, place, "parameters")
        if read.name in found:
            raise invalid("tools", f"tools has the name {read.name!r} more than once")
        found[read.name] = read
    return tuple(found.values())


def _tool_choice(choice: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    named = choice if isinstance(choice, dict) and choice.get("type") == "function" else {}
    return chosen(choice, named.get("name"), tools)
