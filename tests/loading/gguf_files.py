"""Small GGUF files, written the way llama.cpp's converter does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

K_QUANT_HALVES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
}
"""Byte offsets of the float16 numbers in a block: all else in a block may be any bits."""


@dataclass(frozen=True)
class Sizes:
    """Of a small model; 256 is the block of a k-quant."""

    vocab: int = 40
    hidden: int = 256
    intermediate: int = 512
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    context: int = 128


def gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module == "rope_freqs":
        return name
    if module in TO_GGUF:
        return f"{TO_GGUF[module]}.{suffix}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{TO_GGUF[rest]}.{suffix}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of each head: 0, D/2, 1, D/2 + 1, ..."""
    dim = weight.shape[0] // heads
    order = [
        head * dim + i + half * (dim // 2)
        for head in range(heads)
        for i in range(dim // 2)
        for half in (0, 1)
    ]
    return weight[order]


def quantise(weight: np.ndarray, kind: Kind, rng: np.random.Generator) -> np.ndarray:
    """Raw rows of `weight` in `kind`; for k-quants, which gguf can't write, of random numbers instead."""
    if kind not in K_QUANT_HALVES:
        return gguf.quants.quantize(weight, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (weight.shape[0], weight.shape[1] // block, size), dtype=np.uint8)
    for at in K_QUANT_HALVES[kind]:
        scale = rng.normal(0, 0.01, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., at : at + 2] = scale.view(np.uint8)
    return raw.reshape(weight.shape[0], -1)


def write_gguf(
    path: Path,
    family: str,
    sizes: Sizes,
    tensors: dict[str, torch.Tensor],
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Writes matrices in `kind`, vectors in float32; returns what the file means, by Hugging Face names."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(sizes.layers)
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.intermediate)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(2)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i} \u00e9" for i in range(sizes.vocab)])
    writer.add_array("tokenizer.ggml.token_type", [1] * sizes.vocab)
    for key, value in (metadata or {}).items():
        full = key if key.startswith("split.") else f"{family}.{key}"
        (
            writer.add_string
            if isinstance(value, str)
            else writer.add_float32
            if isinstance(value, float)
            else writer.add_uint32
        )(full, value)
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        heads = (
            {"q_proj": sizes.heads, "k_proj": sizes.kv_heads}.get(name.split(".")[-2])
            if family == "llama"
            else None
        )
        if heads:
            array = interleave(array, heads)
        if array.ndim == 2 and kind != Kind.F32:
            array = quantise(array, kind, rng)
            writer.add_tensor(gguf_name(name), array, raw_dtype=kind)
            array = gguf.quants.dequantize(array, kind)
        else:
            writer.add_tensor(gguf_name(name), array)
        meant[name] = torch.from_numpy(uninterleave(array, heads) if heads else array.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def uninterleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleave`."""
    order = interleave(np.arange(weight.shape[0]), heads)
    return weight[np.argsort(order)]


def random_tensors(sizes: Sizes, family: str, tied: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of a model of `family`, float32."""
    generator = torch.Generator().manual_seed(seed)
    q, kv, inter = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.intermediate
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes.vocab, sizes.hidden)}
    for layer in range(sizes.layers):
        here = f"model.layers.{layer}"
        shapes |= {
            f"{here}.input_layernorm.weight": (sizes.hidden,),
            f"{here}.self_attn.q_proj.weight": (q, sizes.hidden),
            f"{here}.self_attn.k_proj.weight": (kv, sizes.hidden),
            f"{here}.self_attn.v_proj.weight": (kv, sizes.hidden),
            f"{here}.self_attn.o_proj.weight": (sizes.hidden, q),
            f"{here}.post_attention_layernorm.weight": (sizes.hidden,),
            f"{here}.mlp.gate_proj.weight": (inter, sizes.hidden),
            f"{here}.mlp.up_proj.weight": (inter, sizes.hidden),
            f"{here}.mlp.down_proj.weight": (sizes.hidden, inter),
        }
        if family == "qwen2":
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{here}.self_attn.{part}_proj.bias"] = (rows,)
        if family == "qwen3":
            for part in "qk":
                shapes[f"{here}.self_attn.{part}_norm.weight"] = (sizes.head_dim,)
    shapes["model.norm.weight"] = (sizes.hidden,)
    if not tied:
        shapes["lm_head.weight"] = (sizes.vocab, sizes.hidden)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
