"""Which model file serves which configuration."""

from collections.abc import Callable

from quickturn.models import (
    gemma3,
    gpt_oss,
    llama,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from quickturn.models.base import Architecture
from quickturn.models.config import HfConfig, UnsupportedModelError

_BY_CLASS: dict[str, Callable[[HfConfig], Architecture]] = {
    "Gemma3ForCausalLM": gemma3.architecture,
    "Gemma3ForConditionalGeneration": gemma3.architecture,
    "GptOssForCausalLM": gpt_oss.architecture,
    "LlamaForCausalLM": llama.architecture,
    "Qwen2ForCausalLM": qwen2.architecture,
    "Qwen3ForCausalLM": qwen3.architecture,
    "Qwen3MoeForCausalLM": qwen3_moe.architecture,
    "Qwen3NextForCausalLM": qwen3_next.architecture,
    "Qwen3_5ForCausalLM": qwen3_5.architecture,
    "Qwen3_5ForConditionalGeneration": qwen3_5.architecture,
    "Qwen3_5MoeForCausalLM": qwen3_5_moe.architecture,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5_moe.architecture,
}
_BY_TYPE = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


def supported_architectures() -> tuple[str, ...]:
    """Class names in `architectures` of a config that can be served."""
    return tuple(sorted(_BY_CLASS))


def architecture_of(hf: HfConfig) -> Architecture:
    """The declared model of a Hugging Face config, by `architectures`, or by `model_type` where that is
    absent.

    Raises UnsupportedModelError, listing what is supported, if no model file serves it.
    """
    names = list(hf.get("architectures") or [])
    if not names and hf.get("model_type") in _BY_TYPE:
        names = [_BY_TYPE[hf["model_type"]]]
    for name in names:
        if name in _BY_CLASS:
            return _BY_CLASS[name](hf)
    what = ", ".join(names) or f"model_type {hf.get('model_type')!r}"
    raise UnsupportedModelError(
        f"{what} is not supported; supported are {', '.join(supported_architectures())}"
    )
