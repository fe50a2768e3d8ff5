"""Qwen3.5, dense: the layers of Qwen3-Next with a plain feed-forward, the text model inside a larger one."""

from quickturn.models.base import Architecture
from quickturn.models.config import HfConfig, text_config
from quickturn.models.qwen3_next import HybridConfig, hybrid, parse_hybrid

PREFIXES = (("model.language_model.", "model."), ("language_model.model.", "model."))
"""Under which name the text model's weights lie when it has a sibling that sees images."""


def parse(hf: HfConfig) -> HybridConfig:
    """The configuration in a Hugging Face config, of the text model or of all of it."""
    hf = text_config(hf)
    layers = int(hf.get("num_hidden_layers") or 0)
    return parse_hybrid(hf, (False,) * layers, interleaved=False)


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    return hybrid("qwen3_5", parse(hf), PREFIXES)
