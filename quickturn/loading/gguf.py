"""GGUF files of llama, qwen2 and qwen3 models: their configuration, and their tensors dequantised as they are
read.
"""

import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from gguf import GGMLQuantizationType

from quickturn.files.errors import LoadError
from quickturn.files.gguf_header import GgufHeader, GgufTensor, read_header
from quickturn.loading.dequantize import block_size, dequantize_into, row_bytes
from quickturn.loading.source import box, take
from quickturn.parallel.weights import Cut

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_TOP_NAME = re.compile(r"([a-z_]+)\.(weight|bias)")
_ROTARY_FACTORS = "rope_freqs.weight"


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, None if it has none here."""
    if (match := _LAYER_NAME.fullmatch(name)) and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    if (match := _TOP_NAME.fullmatch(name)) and match[1] in _TOP:
        return f"{_TOP[match[1]]}.{match[2]}"
    return None


_KEPT: dict[GGMLQuantizationType, Literal["int8", "int4"]] = {
    GGMLQuantizationType.Q8_0: "int8",
    GGMLQuantizationType.Q4_0: "int4",
    GGMLQuantizationType.Q4_1: "int4",
}


class GgufSource:
    """The tensors of a GGUF file under Hugging Face names, and the configuration in its metadata."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises LoadError if it isn't a GGUF file of a family that is served."""
        self.header = read_header(path)
        self._data = _map(path)
        family = self.header.metadata.get("general.architecture")
        if family not in _CLASSES:
            raise LoadError(
                f"{path.name} holds a {family!r} model; files of {', '.join(sorted(_CLASSES))} are read"
            )
        parts = int(self.header.metadata.get("split.count") or 1)
        if parts > 1:
            raise LoadError(
                f"{path.name} is one of {parts} parts of a model; join them first (llama-gguf-split --merge)"
            )
        self.family: str = family
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in self.header.tensors.items():
            if name != _ROTARY_FACTORS:
                self._tensors[hf_name(name) or name] = tensor
        self.config = _config(self.header, family, self._tensors, self._rotary_factors())
        self._heads = {
            "q_proj": int(self.config["num_attention_heads"]),
            "k_proj": int(self.config["num_key_value_heads"]),
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """How the file's own numbers can stay as they are; None for formats that only dequantise."""
        return _KEPT.get(GGMLQuantizationType(self._tensors[name].ggml_type))

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """Dequantise tensor `name`, or that part of it, to `out`, casting on the way."""
        tensor = self._tensors[name]
        raw = self._raw(tensor)
        heads = self._heads.get(name.split(".")[-2]) if self.family == "llama" else None
        if cut is None or len(cut.shape) == 1:
            whole = out if cut is None else torch.empty(cut.shape, dtype=out.dtype)
            if heads:
                raw = _unpermute(raw if whole.ndim == 2 else raw.view(whole.shape[0], -1), heads)
            target = whole if whole.ndim == 2 else whole.unsqueeze(0)
            dequantize_into(raw.view(target.shape[0], -1), tensor.ggml_type, target)
            if cut is not None:
                out.copy_(take(whole, cut).reshape(out.shape))
            return
        block, size = block_size(tensor.ggml_type)
        head = tensor.shape[0] // heads if heads else 1
        ((low, high), (first, last)), rest = box(cut, (head, block))
        raw = raw[low:high, first // block * size : last // block * size].contiguous()
        if heads:
            raw = _unpermute(raw, (high - low) // head)
        part = torch.empty((high - low, last - first), dtype=out.dtype)
        dequantize_into(raw, tensor.ggml_type, part)
        out.copy_(take(part, rest).reshape(out.shape))

    def _raw(self, tensor: GgufTensor) -> torch.Tensor:
        rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
        size = rows * row_bytes(tensor.ggml_type, tensor.shape[-1])
        if tensor.offset + size > len(self._data):
            raise LoadError(
                f"{self.header.path} is cut off: a tensor ends beyond its {len(self._data)} bytes"
            )
        return torch.frombuffer(self._data, dtype=torch.uint8, count=size, offset=tensor.offset).view(
            rows, -1
        )

    def _rotary_factors(self) -> tuple[float, ...] | None:
        tensor = self.header.tensors.get(_ROTARY_FACTORS)
        if tensor is None:
            return None
        factors = torch.empty(1, tensor.shape[0])
        dequantize_into(self._raw(tensor), tensor.ggml_type, factors)
        return tuple(factors[0].tolist())


def _map(path: Path) -> mmap.mmap:
    """The file in memory, copy on write: torch wants memory that it could write."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Llama's q and k rows in Hugging Face's order.

    llama.cpp rotates neighbours (2i, 2i + 1), Hugging Face rotates (i, i + D/2), so files for the former have
    the rows of each head interleaved. Whole rows move, so it is done on the quantised bytes.
    """
    half = rows.shape[0] // heads // 2
    return rows.view(heads, half, 2, -1).transpose(1, 2).reshape(rows.shape)


def _config(
    header: GgufHeader,
    family: str,
    tensors: Mapping[str, GgufTensor],
    rotary_factors: tuple[float, ...] | None,
) -> dict[str, Any]:
    """The metadata as a Hugging Face config."""

    def get(key: str, default: Any = None) -> Any:
        return header.metadata.get(f"{family}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise LoadError(f"{header.path} lacks the metadata {family}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise LoadError(f"{family}.{key} differs between layers, which is not supported")
            value = value[0]
        return value

    if "model.embed_tokens.weight" not in tensors:
        raise LoadError(
            f"{header.path} has no token_embd.weight; is it a part of a split file, or an adapter?"
        )
    heads = int(need("attention.head_count"))
    hidden = int(need("embedding_length"))
    head_dim = int(get("attention.key_length") or hidden // heads)
    if int(get("attention.value_length") or head_dim) != head_dim:
        raise LoadError("keys and values of different head sizes are not supported")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": int(need("feed_forward_length")),
        "num_hidden_layers": int(need("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(need("attention.head_count_kv"))
        if get("attention.head_count_kv")
        else heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(need("context_length")),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": family != "qwen2" and "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
        "num_local_experts": int(get("expert_count") or 0),
        "rope_parameters": _rope(get, head_dim, rotary_factors),
    }
    for key in ("bos", "eos", "pad"):
        number = header.metadata.get(f"tokenizer.ggml.{'padding' if key == 'pad' else key}_token_id")
        if number is not None:
            config[f"{key}_token_id"] = int(number)
    return config


def _rope(get: Any, head_dim: int, factors: tuple[float, ...] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": float(get("rope.freq_base") or 10000.0),
        "partial_rotary_factor": int(get("rope.dimension_count") or head_dim) / head_dim,
    }
    kind = get("rope.scaling.type") or "none"
    if factors is not None:
        return rope | {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise LoadError(
            f"rotary scaling {kind!r} in GGUF metadata is not supported; none, linear and yarn are"
        )
    rope |= {"rope_type": kind, "factor": float(get("rope.scaling.factor") or 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
        rope["beta_fast"] = get("rope.scaling.yarn_beta_fast")
        rope["beta_slow"] = get("rope.scaling.yarn_beta_slow")
    return rope
