"""Which model file serves which configuration."""

from collections.abc import Callable

from quickturn.models import llama, qwen2, qwen3
from quickturn.models.base import Architecture
from quickturn.models.config import HfConfig, UnsupportedModelError

_BY_CLASS: dict[str, Callable[[HfConfig], Architecture]] = {
    "LlamaForCausalLM": llama.architecture,
    "Qwen2ForCausalLM": qwen2.architecture,
    "Qwen3ForCausalLM": qwen3.architecture,
}
_BY_TYPE = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


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
