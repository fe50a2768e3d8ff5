"""`tools` and `tool_choice` of the OpenAI chat API."""

from typing import Any

from quickturn.server.answering import ToolChoice
from quickturn.server.errors import invalid
from quickturn.text.tools import Tool

MAX_TOOLS = 512


def read_tools(tools: Any) -> tuple[Tool, ...]:
    """The tools of a request. Raises ApiError naming the one that is wrong."""
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools must be a list of at most {MAX_TOOLS} tools")
    found = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in found]
    for name in names:
        if names.count(name) > 1:
            raise invalid("tools", f"tools has the name {name!r} more than once")
    return found


def read_tool_choice(choice: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """`tool_choice`: a word, or the one function to call. Raises ApiError for one that can't be followed."""
    if choice is None or choice in ("auto", "none"):
        return ToolChoice(choice or "auto")
    if choice == "required":
        result = ToolChoice("required")
    else:
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise invalid("tool_choice", "tool_choice must be 'auto', 'none', 'required' or name a function")
        result = ToolChoice("required", name)
    check_tool_choice(result, tools)
    return result


def check_tool_choice(choice: ToolChoice, tools: tuple[Tool, ...]) -> None:
    """Raise ApiError if a choice that forces a call can't be followed."""
    if not tools:
        raise invalid("tool_choice", "tool_choice needs tools")
    if choice.name is not None and all(tool.name != choice.name for tool in tools):
        raise invalid("tool_choice", f"tool_choice names {choice.name!r}, which is not among the tools")


def _tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise invalid(place, f"{place}.type must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{place}.function", f"{place}.function must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > 256:
        raise invalid(f"{place}.function.name", f"{place}.function.name must be 1 to 256 characters")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.function.parameters", f"{place}.function.parameters must be a JSON schema")
    return Tool(
        name=name,
        parameters=parameters or {},
        description=str(function.get("description") or ""),
        strict=function.get("strict") is True,
        definition=tool,
    )
