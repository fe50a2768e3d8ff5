"""Llama 1 to 3, and what is shaped like them (SmolLM2)."""

from dataclasses import dataclass

from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, gate_up_proj, qkv_proj
from quickturn.models.config import DecoderShape, HfConfig, decoder_shape
from quickturn.models.declare import Declaration, Norm, Row


@dataclass(frozen=True)
class LlamaConfig:
    """A decoder's shape, and whether the maps of attention and feed-forward have biases."""

    shape: DecoderShape
    attention_bias: bool
    mlp_bias: bool


def parse(hf: HfConfig) -> LlamaConfig:
    """The configuration in a Hugging Face config."""
    biases = bool(hf.get("attention_bias", False)), bool(hf.get("mlp_bias", False))
    return LlamaConfig(decoder_shape(hf), *biases)


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    config = parse(hf)
    return decoder("llama", config.shape, lambda index: decoder_layer(config, index))


def decoder_layer(config: LlamaConfig, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`."""
    shape = config.shape
    here = f"model.layers.{index}"
    attn, mlp = f"{here}.self_attn", f"{here}.mlp"
    return (
        Norm(f"{here}.input_layernorm", shape.hidden, shape.eps, "attn", adds=index > 0),
        qkv_proj(attn, shape, config.attention_bias),
        attend(attn, shape, index),
        Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, shape.hidden, config.attention_bias),
        Norm(f"{here}.post_attention_layernorm", shape.hidden, shape.eps, "dense"),
        gate_up_proj(mlp, shape, config.mlp_bias),
        Row(f"{mlp}.down_proj", "dense", shape.intermediate, shape.hidden, config.mlp_bias),
    )
