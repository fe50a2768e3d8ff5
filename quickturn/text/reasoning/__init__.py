"""How models write what they think, by name; which one a model's chat template speaks of."""

from quickturn.text.parsing.formats import ReasoningFormat

_THINK = ("<think>", "</think>")

FORMATS: dict[str, ReasoningFormat] = {
    format.name: format
    for format in (
        ReasoningFormat("qwen3", *_THINK),
        ReasoningFormat("deepseek_v3", *_THINK),
        ReasoningFormat("deepseek_r1", *_THINK, starts_open=True),
        ReasoningFormat("glm45", *_THINK),
        ReasoningFormat("kimi_k2", *_THINK),
        ReasoningFormat("minimax_m2", *_THINK),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("kimi_vl", "◁think▷", "◁/think▷"),
    )
}


def detect(template: str) -> ReasoningFormat | None:
    """The format that a chat template writes; None when it knows no thinking."""
    for name in ("qwen3", "mistral", "kimi_vl"):
        if FORMATS[name].close in template:
            return FORMATS[name]
    return None
