"""Qwen3.5 with mixtures of experts in every layer."""

from quickturn.models.base import Architecture
from quickturn.models.config import HfConfig, text_config
from quickturn.models.qwen3_5 import PREFIXES
from quickturn.models.qwen3_next import HybridConfig, hybrid, parse_hybrid


def parse(hf: HfConfig) -> HybridConfig:
    """The configuration in a Hugging Face config, of the text model or of all of it."""
    hf = text_config(hf)
    layers = int(hf.get("num_hidden_layers") or 0)
    return parse_hybrid(hf, (True,) * layers, interleaved=False)


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    return hybrid("qwen3_5_moe", parse(hf), PREFIXES)
