"""How models write tool calls, by name; which one a model's chat template speaks of."""

from quickturn.text.parsing.formats import ToolFormat
from quickturn.text.tool_calls import (
    deepseek,
    glm45,
    hermes,
    invoke,
    kimi_k2,
    llama3_json,
    mistral,
    pythonic,
    qwen3_coder,
)

FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (
        hermes.FORMAT,
        qwen3_coder.FORMAT,
        deepseek.V3,
        deepseek.V31,
        invoke.DEEPSEEK_V32,
        kimi_k2.FORMAT,
        glm45.FORMAT,
        llama3_json.FORMAT,
        pythonic.FORMAT,
        mistral.FORMAT,
        invoke.MINIMAX_M2,
    )
}

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((deepseek.SECTION, "```json"), "deepseek_v3"),
    ((deepseek.SECTION,), "deepseek_v31"),
    (("DSML",), "deepseek_v32"),
    ((kimi_k2.SECTION,), "kimi_k2"),
    ((glm45.KEY,), "glm45"),
    ((invoke.MINIMAX[0],), "minimax_m2"),
    ((qwen3_coder.FUNCTION, qwen3_coder.PARAMETER), "qwen3_coder"),
    ((hermes.OPEN,), "hermes"),
    ((mistral.OPEN,), "mistral"),
    ((pythonic.OPEN,), "pythonic"),
    (("func_name1(",), "pythonic"),
    (("ipython", '"parameters":'), "llama3_json"),
)
"""What a chat template holds that teaches a format; the first that fits counts."""


def detect(template: str) -> ToolFormat | None:
    """The format that a chat template writes; None when it knows no tools."""
    for signs, name in _SIGNS:
        if all(sign in template for sign in signs):
            return FORMATS[name]
    return None
