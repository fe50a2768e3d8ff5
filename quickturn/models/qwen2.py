"""Qwen2 and Qwen2.5: biases on q, k and v, and in some configs a sliding window in the upper layers."""

from dataclasses import dataclass

from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, gate_up_proj, qkv_proj
from quickturn.models.config import DecoderShape, HfConfig, decoder_shape, window_layers
from quickturn.models.declare import Declaration, Norm, Row


@dataclass(frozen=True)
class Qwen2Config:
    """A decoder's shape; all else is the same in the whole family."""

    shape: DecoderShape


def parse(hf: HfConfig) -> Qwen2Config:
    """The configuration in a Hugging Face config."""
    return Qwen2Config(decoder_shape(hf, windows=window_layers(hf)))


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    config = parse(hf)
    return decoder("qwen2", config.shape, lambda index: decoder_layer(config, index))


def decoder_layer(config: Qwen2Config, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`."""
    shape = config.shape
    here = f"model.layers.{index}"
    attn, mlp = f"{here}.self_attn", f"{here}.mlp"
    return (
        Norm(f"{here}.input_layernorm", shape.hidden, shape.eps, "attn", adds=index > 0),
        qkv_proj(attn, shape, bias=True),
        attend(attn, shape, index),
        Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, shape.hidden),
        Norm(f"{here}.post_attention_layernorm", shape.hidden, shape.eps, "dense"),
        gate_up_proj(mlp, shape, bias=False),
        Row(f"{mlp}.down_proj", "dense", shape.intermediate, shape.hidden),
    )
