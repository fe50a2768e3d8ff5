"""How models write tool calls, by name; which one a model's chat template speaks of."""

from quickturn.text.parsing.formats import ToolFormat
from quickturn.text.tool_calls import hermes

FORMATS: dict[str, ToolFormat] = {format.name: format for format in (hermes.FORMAT,)}


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template writes; None when it knows no tools."""
    return hermes.FORMAT if "<tool_call>" in template else None
