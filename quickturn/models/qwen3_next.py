"""Qwen3-Next: three of four layers are gated delta nets, the fourth gated attention; mixtures of experts.

Qwen3.5 has the same layers and stores some of their weights in another way; `hybrid_layer` serves both.
"""

from dataclasses import dataclass, replace

from quickturn.layers.moe import Routing
from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, gate_up_proj, gated_qkv_proj
from quickturn.models.config import DecoderShape, HfConfig, decoder_shape, layer_kinds, require
from quickturn.models.declare import Column, Declaration, Norm, Part, Row
from quickturn.models.experts import Mix, Shared, stored_experts
from quickturn.models.mixers import Delta
from quickturn.parallel.placement import Axis


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of the gated delta nets. `interleaved`: queries, keys, values and gates of a key head lie
    together in the checkpoint.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    interleaved: bool


@dataclass(frozen=True)
class MixtureShape:
    """Sizes of the mixtures of experts. `shared` is the size of the expert that every token takes."""

    experts: int
    intermediate: int
    shared: int
    routing: Routing


@dataclass(frozen=True)
class HybridConfig:
    """A decoder's shape, which layers are linear and which sparse, and their sizes."""

    shape: DecoderShape
    attention_bias: bool
    linear: tuple[bool, ...]
    delta: DeltaShape
    sparse: tuple[bool, ...]
    mixture: MixtureShape | None


def parse(hf: HfConfig) -> HybridConfig:
    """The configuration in a Hugging Face config of Qwen3-Next."""
    layers = range(int(hf.get("num_hidden_layers") or 0))
    dense, step = set(hf.get("mlp_only_layers") or ()), int(hf.get("decoder_sparse_step") or 1)
    sparse = tuple(index not in dense and (index + 1) % step == 0 for index in layers)
    return parse_hybrid(hf, sparse, interleaved=True)


def parse_hybrid(hf: HfConfig, sparse: tuple[bool, ...], *, interleaved: bool) -> HybridConfig:
    """The configuration of a family of hybrids; `sparse` layers have experts."""
    hf = {"partial_rotary_factor": 0.25, "head_dim": 256} | dict(hf)
    shape = decoder_shape(hf, mixture=any(sparse))
    every = int(hf.get("full_attention_interval") or 4)
    default = tuple(
        "full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(shape.layers)
    )
    kinds = layer_kinds(hf, default, ("full_attention", "linear_attention"))
    return HybridConfig(
        shape=replace(shape, windows=(0,) * shape.layers),
        attention_bias=bool(hf.get("attention_bias", False)),
        linear=tuple(kind == "linear_attention" for kind in kinds),
        delta=DeltaShape(
            key_heads=int(hf.get("linear_num_key_heads", 16)),
            value_heads=int(hf.get("linear_num_value_heads", 32)),
            key_dim=int(hf.get("linear_key_head_dim", 128)),
            value_dim=int(hf.get("linear_value_head_dim", 128)),
            width=int(hf.get("linear_conv_kernel_dim", 4)),
            interleaved=interleaved,
        ),
        sparse=sparse,
        mixture=_mixture(hf) if any(sparse) else None,
    )


def _mixture(hf: HfConfig) -> MixtureShape:
    require(
        hf, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
    )
    top_k = int(hf["num_experts_per_tok"])
    return MixtureShape(
        experts=int(hf["num_experts"]),
        intermediate=int(hf["moe_intermediate_size"]),
        shared=int(hf["shared_expert_intermediate_size"]),
        routing=Routing(top_k, normalize=bool(hf.get("norm_topk_prob", True))),
    )


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    return hybrid("qwen3_next", parse(hf))


def hybrid(family: str, config: HybridConfig, prefixes: tuple[tuple[str, str], ...] = ()) -> Architecture:
    """A decoder of such layers. The drafting layer (`mtp`) and what sees images are left in the
    checkpoint.
    """
    return decoder(
        family,
        config.shape,
        lambda index: hybrid_layer(config, index),
        norm_kind="offset",
        prefixes=prefixes,
        ignored=("mtp.", "model.visual."),
    )


def hybrid_layer(config: HybridConfig, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`."""
    shape = config.shape
    here = f"model.layers.{index}"
    axis: Axis = "moe" if config.sparse[index] else "dense"
    return (
        Norm(f"{here}.input_layernorm", shape.hidden, shape.eps, "attn", adds=index > 0, kind="offset"),
        *(linear_attention if config.linear[index] else full_attention)(config, index),
        Norm(f"{here}.post_attention_layernorm", shape.hidden, shape.eps, axis, kind="offset"),
        *feed_forward(config, index),
    )


def full_attention(config: HybridConfig, index: int) -> tuple[Declaration, ...]:
    """Attention whose output is gated, head by head, by what its input says."""
    shape = config.shape
    attn = f"model.layers.{index}.self_attn"
    bias = config.attention_bias
    plain = attend(attn, shape, index, norms=(f"{attn}.q_norm", f"{attn}.k_norm"))
    attention = replace(plain, norm_kind="offset", gated=True)
    out = Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, shape.hidden, bias)
    return gated_qkv_proj(attn, shape, bias), attention, out


def linear_attention(config: HybridConfig, index: int) -> tuple[Declaration, ...]:
    """A gated delta net: one product for all that it's made of, the recurrence, and the way back."""
    shape, delta = config.shape, config.delta
    module = f"model.layers.{index}.linear_attn"
    recurrence = Delta(
        f"{module}.delta",
        module,
        layer=index,
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        width=delta.width,
        eps=shape.eps,
    )
    return (
        Column(f"{module}.in_proj", "attn", shape.hidden, _inputs(module, delta)),
        recurrence,
        Row(f"{module}.out_proj", "attn", delta.value_heads * delta.value_dim, shape.hidden),
    )


def _inputs(module: str, delta: DeltaShape) -> tuple[Part, ...]:
    """q, k, v, z, b, a, each by head; value heads that share a key head stay together."""
    per_key = delta.value_heads // delta.key_heads
    key, value = delta.key_dim, delta.value_dim * per_key
    keys, values = delta.key_heads * key, delta.key_heads * value
    if delta.interleaved:
        qkvz, ba, groups = f"{module}.in_proj_qkvz", f"{module}.in_proj_ba", delta.key_heads
        both, pair = 2 * key + 2 * value, 2 * per_key
        return (
            Part(qkvz, keys, key, 0, both, groups),
            Part(qkvz, keys, key, key, both, groups),
            Part(qkvz, values, value, 2 * key, both, groups),
            Part(qkvz, values, value, 2 * key + value, both, groups),
            Part(ba, delta.value_heads, per_key, 0, pair, groups),
            Part(ba, delta.value_heads, per_key, per_key, pair, groups),
        )
    qkv, whole = f"{module}.in_proj_qkv", 2 * keys + values
    return (
        Part(qkv, keys, key, 0, whole),
        Part(qkv, keys, key, keys, whole),
        Part(qkv, values, value, 2 * keys, whole),
        Part(f"{module}.in_proj_z", values, value),
        Part(f"{module}.in_proj_b", delta.value_heads, per_key),
        Part(f"{module}.in_proj_a", delta.value_heads, per_key),
    )


def feed_forward(config: HybridConfig, index: int) -> tuple[Declaration, ...]:
    """A mixture of experts with one that every token takes, or a dense feed-forward."""
    shape, mixture = config.shape, config.mixture
    mlp = f"model.layers.{index}.mlp"
    if not config.sparse[index] or mixture is None:
        return gate_up_proj(mlp, shape, bias=False), Row(
            f"{mlp}.down_proj", "dense", shape.intermediate, shape.hidden
        )
    mix = Mix(
        f"{mlp}.experts",
        router=f"{mlp}.gate",
        hidden=shape.hidden,
        intermediate=mixture.intermediate,
        count=mixture.experts,
        routing=mixture.routing,
        experts=stored_experts(f"{mlp}.experts", mixture.experts, shape.hidden, mixture.intermediate),
        shared=Shared(f"{mlp}.shared_expert", mixture.shared, f"{mlp}.shared_expert_gate"),
    )
    return (mix,)
