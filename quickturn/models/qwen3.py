"""Qwen3, dense: a norm of each query and key head ahead of the rotation, heads of 128 dims whatever the
hidden size.
"""

from dataclasses import dataclass

from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, gate_up_proj, qkv_proj
from quickturn.models.config import DecoderShape, HfConfig, decoder_shape, window_layers
from quickturn.models.declare import Declaration, Norm, Row


@dataclass(frozen=True)
class Qwen3Config:
    """A decoder's shape, and whether the maps of attention have biases."""

    shape: DecoderShape
    attention_bias: bool


def parse(hf: HfConfig) -> Qwen3Config:
    """The configuration in a Hugging Face config."""
    shape = decoder_shape(hf, head_dim=128, windows=window_layers(hf))
    return Qwen3Config(shape, bool(hf.get("attention_bias", False)))


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    config = parse(hf)
    return decoder("qwen3", config.shape, lambda index: decoder_layer(config, index))


def decoder_layer(config: Qwen3Config, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`."""
    shape = config.shape
    here = f"model.layers.{index}"
    attn, mlp = f"{here}.self_attn", f"{here}.mlp"
    return (
        Norm(f"{here}.input_layernorm", shape.hidden, shape.eps, "attn", adds=index > 0),
        qkv_proj(attn, shape, config.attention_bias),
        attend(attn, shape, index, norms=(f"{attn}.q_norm", f"{attn}.k_norm")),
        Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, shape.hidden, config.attention_bias),
        Norm(f"{here}.post_attention_layernorm", shape.hidden, shape.eps, "dense"),
        gate_up_proj(mlp, shape, bias=False),
        Row(f"{mlp}.down_proj", "dense", shape.intermediate, shape.hidden),
    )
