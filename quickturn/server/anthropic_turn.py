"""Bodies of the Anthropic Messages API, and the turn that they ask for."""

import hashlib
from typing import Any

import msgspec

from quickturn.server.answering import ToolChoice, Turn
from quickturn.server.anthropic_content import chat_messages
from quickturn.server.errors import invalid, not_supported
from quickturn.server.fields import MAX_STOP_LENGTH, MAX_STOPS, CommonFields
from quickturn.server.openai_format import read_response_format
from quickturn.server.openai_tools import MAX_TOOLS, check_tool_choice, read_function
from quickturn.text.tools import Tool

RETENTION_S = {"5m": 300.0, "1h": 3600.0}


class CountBody(msgspec.Struct, kw_only=True):
    """What `count_tokens` reads: all that becomes a part of the prompt. Unknown fields are ignored."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(CountBody, kw_only=True):
    """The body of a message. `mcp_servers` and `container` would need services that this server doesn't
    have.
    """

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


def message_turn(body: MessagesBody) -> Turn:
    """What the body asks for. Raises ApiError naming the field that is wrong or not supported."""
    for name, value in (("mcp_servers", body.mcp_servers), ("container", body.container)):
        if value:
            raise not_supported(name, f"{name} is not supported: this server only generates")
    stops = body.stop_sequences
    if stops and (len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops)):
        raise invalid(
            "stop_sequences",
            f"stop_sequences must hold at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters",
        )
    retention = retention_seconds(body)
    fields = CommonFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=stops,
        prompt_cache_key=_session(body, retention),
        retention=retention,
    )
    return prompt_turn(body, fields, (body.max_tokens, "max_tokens"))


def prompt_turn(
    body: CountBody,
    fields: CommonFields | None = None,
    max_tokens: tuple[int | None, str] = (None, "max_tokens"),
) -> Turn:
    """The turn of a body's prompt, with `fields` to sample it. Raises ApiError."""
    tools = read_tools(body.tools)
    choice, parallel = _tool_choice(body.tool_choice, tools)
    template: dict[str, Any] = {}
    kind = (body.thinking or {}).get("type")
    if kind is not None:
        template["enable_thinking"] = template["thinking"] = kind != "disabled"
    effort = (body.output_config or {}).get("effort")
    if effort is not None:
        template["reasoning_effort"] = effort
    output = read_response_format((body.output_config or {}).get("format"), "output_config.format")
    return Turn(
        messages=chat_messages(body.system, body.messages),
        fields=fields if fields is not None else CommonFields(),
        max_tokens=max_tokens,
        tools=tools,
        tool_choice=choice,
        parallel_calls=parallel,
        template=template,
        output=output,
        output_param="output_config.format",
    )


def read_tools(tools: list[dict[str, Any]] | None) -> tuple[Tool, ...]:
    """The client's own tools; tools that Anthropic's servers would run are left out. Raises ApiError."""
    if tools is not None and len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools must hold at most {MAX_TOOLS} tools")
    found: dict[str, Tool] = {}
    for index, tool in enumerate(tools or ()):
        if "input_schema" not in tool:
            continue
        read = read_function(tool, f"tools.{index}", "input_schema")
        if tool["input_schema"] is None:
            raise invalid(f"tools.{index}.input_schema", f"tools.{index}.input_schema must be a JSON schema")
        if read.name in found:
            raise invalid(f"tools.{index}.name", f"tools has the name {read.name!r} more than once")
        found[read.name] = read
    return tuple(found.values())


def retention_seconds(body: CountBody) -> float:
    """How long the client wants its prompt kept: the longest `cache_control` in it; 0 without any."""
    blocks: list[Any] = list(body.tools or ())
    blocks += body.system if isinstance(body.system, list) else []
    for message in body.messages:
        content = message.get("content")
        blocks += content if isinstance(content, list) else []
    controls = [
        body.cache_control,
        *(block.get("cache_control") for block in blocks if isinstance(block, dict)),
    ]
    times = [
        RETENTION_S.get(str(control.get("ttl", "5m")), RETENTION_S["5m"])
        for control in controls
        if isinstance(control, dict)
    ]
    return max(times, default=0.0)


def _tool_choice(choice: dict[str, Any] | None, tools: tuple[Tool, ...]) -> tuple[ToolChoice, bool]:
    """The choice, and whether several calls may follow each other."""
    if choice is None:
        return ToolChoice(), True
    parallel = choice.get("disable_parallel_tool_use") is not True
    match choice.get("type"):
        case "auto" | "none" as mode:
            return ToolChoice(mode), parallel
        case "any":
            result = ToolChoice("required")
        case "tool" if isinstance(choice.get("name"), str):
            result = ToolChoice("required", choice["name"])
        case _:
            raise invalid("tool_choice", "tool_choice.type must be auto, any, none, or tool with a name")
    check_tool_choice(result, tools)
    return result, parallel


def _session(body: MessagesBody, retention: float) -> str | None:
    """Turns of one session share their cache's lifetime. Clients name a session in `metadata.user_id`; one
    that asks for retention without a name is known by how its conversation begins.
    """
    user = (body.metadata or {}).get("user_id")
    if isinstance(user, str) and user:
        return user
    if not retention:
        return None
    beginning = msgspec.json.encode([body.system, body.messages[:1]])
    return hashlib.blake2b(beginning, digest_size=16).hexdigest()
