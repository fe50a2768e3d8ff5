"""Gemma 3, the text model: norms before and after both blocks, five windowed layers for each that sees
all.
"""

from dataclasses import dataclass, replace

from quickturn.layers.rotary import Rotary
from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, gate_up_proj, qkv_proj
from quickturn.models.config import (
    DecoderShape,
    HfConfig,
    UnsupportedModelError,
    decoder_shape,
    layer_kinds,
    require,
    rotary_of,
    text_config,
)
from quickturn.models.declare import Declaration, Norm, Row

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
"""Published configs leave out what the class of transformers has as its default."""

PREFIXES = (("model.language_model.", "model."), ("language_model.", ""))


@dataclass(frozen=True)
class Gemma3Config:
    """A decoder's shape, each layer's rotary embedding, the scale of scores, and what squashes logits."""

    shape: DecoderShape
    attention_bias: bool
    rotaries: tuple[Rotary, ...]
    scale: float
    attention_softcap: float
    logit_softcap: float


def parse(hf: HfConfig) -> Gemma3Config:
    """The configuration in a Hugging Face config, of the text model or of all of it."""
    hf = DEFAULTS | dict(text_config(hf))
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "use_bidirectional_attention is not supported: it is for embedding models"
        )
    activation = hf.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise UnsupportedModelError(
            f"hidden_activation {activation!r} is not supported, only 'gelu_pytorch_tanh'"
        )
    require(hf, "num_hidden_layers")
    every, layers = int(hf.get("sliding_window_pattern") or 6), int(hf["num_hidden_layers"])
    default = tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers))
    kinds = layer_kinds(hf, default, ("sliding_attention", "full_attention"))
    window = int(hf.get("sliding_window") or 4096)
    local, everywhere = _rotaries(hf)
    plain = {key: value for key, value in hf.items() if key not in ("rope_parameters", "hidden_act")}
    return Gemma3Config(
        shape=decoder_shape(
            plain, windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
        ),
        attention_bias=bool(hf.get("attention_bias", False)),
        rotaries=tuple(local if kind == "sliding_attention" else everywhere for kind in kinds),
        scale=float(hf.get("query_pre_attn_scalar") or 256) ** -0.5,
        attention_softcap=float(hf.get("attn_logit_softcapping") or 0.0),
        logit_softcap=float(hf.get("final_logit_softcapping") or 0.0),
    )


def _rotaries(hf: HfConfig) -> tuple[Rotary, Rotary]:
    """Of windowed layers and of those that see all: by kind (transformers 5), or `rope_local_base_freq`
    beside `rope_theta` and `rope_scaling`.
    """
    dim = int(hf["head_dim"])
    given = hf.get("rope_parameters") or {}
    local = given.get("sliding_attention") or {"rope_theta": hf.get("rope_local_base_freq") or 10_000.0}
    everywhere = dict(given.get("full_attention") or {})
    everywhere.setdefault("rope_theta", hf.get("rope_theta") or 1_000_000.0)
    if "rope_type" not in everywhere:
        everywhere |= dict(hf.get("rope_scaling") or {})
    sizes = {"max_position_embeddings": hf["max_position_embeddings"]}
    return (
        rotary_of(sizes | {"rope_parameters": local}, dim)[0],
        rotary_of(sizes | {"rope_parameters": everywhere}, dim)[0],
    )


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    config = parse(hf)
    return decoder(
        "gemma3",
        config.shape,
        lambda index: decoder_layer(config, index),
        norm_kind="offset",
        embed_scale=config.shape.hidden**0.5,
        softcap=config.logit_softcap,
        prefixes=PREFIXES,
        ignored=(
            "model.vision_tower.",
            "model.multi_modal_projector.",
            "vision_tower.",
            "multi_modal_projector.",
        ),
    )


def decoder_layer(config: Gemma3Config, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`: what a block gives is normed before it joins the stream."""
    shape = config.shape
    hidden, eps = shape.hidden, shape.eps
    here = f"model.layers.{index}"
    attn, mlp = f"{here}.self_attn", f"{here}.mlp"
    attention = replace(
        attend(attn, shape, index, norms=(f"{attn}.q_norm", f"{attn}.k_norm")),
        rotary=config.rotaries[index],
        norm_kind="offset",
        scale=config.scale,
        softcap=config.attention_softcap,
    )
    return (
        Norm(f"{here}.input_layernorm", hidden, eps, "attn", adds=index > 0, kind="offset"),
        qkv_proj(attn, shape, config.attention_bias),
        attention,
        Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, hidden, config.attention_bias),
        Norm(f"{here}.post_attention_layernorm", hidden, eps, "dense", adds=False, kind="offset"),
        Norm(f"{here}.pre_feedforward_layernorm", hidden, eps, "dense", kind="offset"),
        gate_up_proj(mlp, shape, bias=False, activation="gelu_tanh"),
        Row(f"{mlp}.down_proj", "dense", shape.intermediate, hidden),
        Norm(f"{here}.post_feedforward_layernorm", hidden, eps, "attn", adds=False, kind="offset"),
    )
