"""Qwen3 with mixtures of experts instead of the dense feed-forward, in all layers or in some."""

from dataclasses import dataclass
from typing import Any

from quickturn.layers.moe import Routing
from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, gate_up_proj, qkv_proj
from quickturn.models.config import DecoderShape, HfConfig, decoder_shape, require, window_layers
from quickturn.models.declare import Declaration, Norm, Row
from quickturn.models.experts import Mix, stored_experts
from quickturn.parallel.placement import Axis


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """A decoder's shape, whether the maps of attention have biases, and the experts of the `sparse`
    layers.
    """

    shape: DecoderShape
    attention_bias: bool
    sparse: tuple[bool, ...]
    experts: int
    intermediate: int
    routing: Routing


def parse(hf: HfConfig) -> Qwen3MoeConfig:
    """The configuration in a Hugging Face config."""
    hf = dict[str, Any]({"num_experts": hf.get("num_local_experts")}) | dict(hf)
    shape = decoder_shape(hf, windows=window_layers(hf), mixture=True)
    require(hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    dense, step = set(hf.get("mlp_only_layers") or ()), int(hf.get("decoder_sparse_step") or 1)
    return Qwen3MoeConfig(
        shape=shape,
        attention_bias=bool(hf.get("attention_bias", False)),
        sparse=tuple(index not in dense and (index + 1) % step == 0 for index in range(shape.layers)),
        experts=int(hf["num_experts"]),
        intermediate=int(hf["moe_intermediate_size"]),
        routing=Routing(int(hf["num_experts_per_tok"]), normalize=bool(hf.get("norm_topk_prob", False))),
    )


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    config = parse(hf)
    return decoder("qwen3_moe", config.shape, lambda index: decoder_layer(config, index))


def decoder_layer(config: Qwen3MoeConfig, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`."""
    shape = config.shape
    here = f"model.layers.{index}"
    attn = f"{here}.self_attn"
    axis: Axis = "moe" if config.sparse[index] else "dense"
    return (
        Norm(f"{here}.input_layernorm", shape.hidden, shape.eps, "attn", adds=index > 0),
        qkv_proj(attn, shape, config.attention_bias),
        attend(attn, shape, index, norms=(f"{attn}.q_norm", f"{attn}.k_norm")),
        Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, shape.hidden, config.attention_bias),
        Norm(f"{here}.post_attention_layernorm", shape.hidden, shape.eps, axis),
        *feed_forward(config, index),
    )


def feed_forward(config: Qwen3MoeConfig, index: int) -> tuple[Declaration, ...]:
    """A mixture of experts, or a dense feed-forward."""
    shape = config.shape
    mlp = f"model.layers.{index}.mlp"
    if not config.sparse[index]:
        return gate_up_proj(mlp, shape, bias=False), Row(
            f"{mlp}.down_proj", "dense", shape.intermediate, shape.hidden
        )
    mix = Mix(
        f"{mlp}.experts",
        router=f"{mlp}.gate",
        hidden=shape.hidden,
        intermediate=config.intermediate,
        count=config.experts,
        routing=config.routing,
        experts=stored_experts(f"{mlp}.experts", config.experts, shape.hidden, config.intermediate),
    )
    return (mix,)
