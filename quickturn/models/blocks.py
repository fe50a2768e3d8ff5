"""What llama-shaped decoders share: fused projections, attention, the frame around the layers."""

from collections.abc import Callable
from typing import Literal

from quickturn.models.base import Architecture
from quickturn.models.config import DecoderShape
from quickturn.models.declare import Column, Declaration, Embed, GatedColumn, Head, Norm, NormKind, Part
from quickturn.models.mixers import Attend


def qkv_proj(attn: str, shape: DecoderShape, bias: bool) -> Column:
    """The maps to queries, keys and values of module `attn` as one."""
    dim = shape.head_dim
    parts = (
        Part(f"{attn}.q_proj", shape.heads * dim, dim),
        Part(f"{attn}.k_proj", shape.kv_heads * dim, dim, repeats=True),
        Part(f"{attn}.v_proj", shape.kv_heads * dim, dim, repeats=True),
    )
    return Column(f"{attn}.qkv_proj", "attn", shape.hidden, parts, bias)


def attend(attn: str, shape: DecoderShape, layer: int, norms: tuple[str, str] | None = None) -> Attend:
    """Attention of decoder layer `layer`, under module `attn`."""
    return Attend(
        f"{attn}.attend",
        layer=layer,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rotary=shape.rotary,
        window=shape.windows[layer],
        norms=norms,
        eps=shape.eps,
    )


def gate_up_proj(
    mlp: str, shape: DecoderShape, bias: bool, activation: Literal["silu", "gelu_tanh"] = "silu"
) -> GatedColumn:
    """The gate and up maps of module `mlp` as one, and the activation between them."""
    gate, up = Part(f"{mlp}.gate_proj", shape.intermediate), Part(f"{mlp}.up_proj", shape.intermediate)
    return GatedColumn(f"{mlp}.gate_up_proj", "dense", shape.hidden, gate, up, bias, activation)


def gated_qkv_proj(attn: str, shape: DecoderShape, bias: bool) -> Column:
    """As `qkv_proj`, with a gate for each query head behind the values; in the checkpoint it lies behind the
    query of its head, in `q_proj`.
    """
    dim = shape.head_dim
    query, gate = (
        Part(f"{attn}.q_proj", shape.heads * dim, dim, start, 2 * dim, shape.heads) for start in (0, dim)
    )
    parts = (
        query,
        Part(f"{attn}.k_proj", shape.kv_heads * dim, dim, repeats=True),
        Part(f"{attn}.v_proj", shape.kv_heads * dim, dim, repeats=True),
        gate,
    )
    return Column(f"{attn}.qkvg_proj", "attn", shape.hidden, parts, bias)


def decoder(
    family: str,
    shape: DecoderShape,
    decoder_layer: Callable[[int], tuple[Declaration, ...]],
    *,
    norm_kind: NormKind = "plain",
    embed_scale: float = 1.0,
    softcap: float = 0.0,
    prefixes: tuple[tuple[str, str], ...] = (),
    ignored: tuple[str, ...] = (),
) -> Architecture:
    """Embedding, layers, last norm and head, under the module names that Hugging Face checkpoints use."""
    return Architecture(
        family=family,
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        max_positions=shape.max_positions,
        embed=Embed("model.embed_tokens", shape.vocab, shape.hidden, embed_scale),
        layers=tuple(decoder_layer(index) for index in range(shape.layers)),
        norm=Norm("model.norm", shape.hidden, shape.eps, "vocab", kind=norm_kind),
        head=Head(
            "lm_head",
            shape.vocab,
            shape.hidden,
            "model.embed_tokens.weight" if shape.tied else "lm_head.weight",
            softcap,
        ),
        prefixes=prefixes,
        ignored=ignored,
    )
