"""`tools` and `tool_choice` of the OpenAI chat API."""

from dataclasses import replace
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
    function = choice.get("function") if isinstance(choice, dict) else None
    return chosen(choice, function.get("name") if isinstance(function, dict) else None, tools)


def chosen(choice: Any, name: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """A choice by OpenAI's words, or else by the `name` that an object in its place gives. Raises
    ApiError.
    """
    if choice is None or choice in ("auto", "none"):
        return ToolChoice(choice or "auto")
    if choice == "required":
        result = ToolChoice("required")
    elif isinstance(name, str):
        result = ToolChoice("required", name)
    else:
        raise invalid("tool_choice", "tool_choice must be 'auto', 'none', 'required' or name a function")
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
    return replace(read_function(function, f"{place}.function", "parameters"), definition=tool)


def read_function(function: dict[str, Any], place: str, schema: str) -> Tool:
    """A function that stands at `place`, its JSON schema under the key `schema`, null for none. It is
    defined for chat templates as Chat Completions defines it. Raises ApiError naming what is wrong.
    """
    name, parameters = function.get("name"), function.get(schema)
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        raise invalid(f"{place}.name", f"{place}.name must be 1 to 256 characters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{place}.{schema}", f"{place}.{schema} must be a JSON schema")
    description = str(function.get("description") or "")
    inner = {"name": name, "description": description, "parameters": parameters or {}}
    return Tool(
        name=name,
        parameters=parameters or {},
        description=description,
        strict=function.get("strict") is True,
        definition={"type": "function", "function": inner},
    )
