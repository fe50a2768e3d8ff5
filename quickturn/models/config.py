"""Reading a Hugging Face `config.json` (transformers 4 and 5 spellings) into what dense decoders share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quickturn.layers.rotary import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    Unscaled,
    YarnScaling,
    yarn_attention_factor,
)

HfConfig = Mapping[str, Any]


class UnsupportedModelError(ValueError):
    """A model, or an option of one, that isn't built here."""


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a dense decoder. `windows`: tokens that each layer sees back, 0 for all."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied: bool
    rotary: Rotary
    windows: tuple[int, ...]


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def require(hf: HfConfig, *keys: str) -> None:
    """Raises ValueError naming those of `keys` that the config has no value for."""
    missing = [key for key in keys if hf.get(key) is None]
    if missing:
        raise ValueError(f"the model's config lacks {', '.join(missing)}")


def text_config(hf: HfConfig) -> HfConfig:
    """The part of a config that describes the text model: itself, unless it nests that beside others."""
    nested = hf.get("text_config")
    if not nested:
        return hf
    outer = {key: hf[key] for key in ("tie_word_embeddings", "quantization_config") if key in hf}
    return outer | dict(nested)


def decoder_shape(
    hf: HfConfig,
    *,
    head_dim: int | None = None,
    default_eps: float = 1e-6,
    windows: tuple[int, ...] | None = None,
    mixture: bool = False,
) -> DecoderShape:
    """The shape stated by `hf`. `head_dim` is the family's default where it isn't `hidden_size / heads`.
    `mixture`: the family has experts, and perhaps no dense feed-forward (`intermediate` is 0 then).

    Raises UnsupportedModelError for options that need what isn't built, ValueError for sizes that don't fit
    together.
    """
    _refuse_unsupported(hf, mixture)
    sizes = _SIZES if mixture else (*_SIZES, "intermediate_size")
    require(hf, *sizes)
    heads = int(hf["num_attention_heads"])
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    dim = int(hf.get("head_dim") or head_dim or int(hf["hidden_size"]) // heads)
    layers = int(hf["num_hidden_layers"])
    rotary, max_positions = rotary_of(hf, dim)
    return DecoderShape(
        vocab=int(hf["vocab_size"]),
        hidden=int(hf["hidden_size"]),
        intermediate=int(hf.get("intermediate_size") or 0),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        eps=float(hf.get("rms_norm_eps", default_eps)),
        max_positions=max_positions,
        tied=bool(hf.get("tie_word_embeddings", False)),
        rotary=rotary,
        windows=windows or (0,) * layers,
    )


def _refuse_unsupported(hf: HfConfig, mixture: bool) -> None:
    activation = hf.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported, only 'silu'")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if not mixture and (hf.get(key) or 0) > 1:
            raise UnsupportedModelError(
                f"mixture-of-experts layers ({key}={hf[key]}) are not supported for this family"
            )
    if hf.get("quantization_config"):
        _refuse_quantization(hf["quantization_config"])


def stored_in_fp8(hf: HfConfig) -> bool:
    """Whether a config says that the checkpoint has matrices in 8-bit floats."""
    return bool(hf.get("quantization_config")) and _fp8_trouble(hf["quantization_config"]) is None


def _refuse_quantization(quantization: Mapping[str, Any]) -> None:
    trouble = _fp8_trouble(quantization)
    if trouble is not None:
        raise UnsupportedModelError(
            f"checkpoints quantised with {trouble} are not supported; take one in fp8 (e4m3), bf16, f16 or"
            " f32, or GGUF"
        )


def _fp8_trouble(quantization: Mapping[str, Any]) -> str | None:
    """None for the kinds of fp8 that are read, else what is unlike them."""
    method = quantization.get("quant_method", "unknown")
    match method:
        case "fp8":
            block = quantization.get("weight_block_size")
            fmt = quantization.get("fmt", "e4m3")
            if fmt == "e4m3" and block in (None, [128, 128], (128, 128)):
                return None
            return f"fp8 of format {fmt} in blocks of {block}"
        case "modelopt":
            algorithm = str(quantization.get("quant_algo", "unknown"))
            return None if algorithm.startswith("FP8") else f"modelopt's {algorithm}"
        case "compressed-tensors":
            groups = dict(quantization.get("config_groups") or {}).values()
            schemes = [group.get("weights") or {} for group in groups]
            if schemes and all(
                scheme.get("type") == "float" and scheme.get("num_bits") == 8 for scheme in schemes
            ):
                return None
            return f"compressed-tensors' {quantization.get('format')}"
    return repr(method)


def window_layers(hf: HfConfig) -> tuple[int, ...]:
    """Windows of each layer from Qwen's keys: `layer_types`, or `use_sliding_window` with
    `max_window_layers`.
    """
    layers = int(hf.get("num_hidden_layers") or 0)
    window = int(hf.get("sliding_window", 4096) or 0) if hf.get("use_sliding_window", False) else 0
    types = hf.get("layer_types")
    if types is None:
        first = int(hf.get("max_window_layers", 28))
        return tuple(window if index >= first else 0 for index in range(layers))
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(f"layer_types {', '.join(unknown)} are not supported for this family")
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries for {layers} layers")
    if "sliding_attention" in types and not window:
        raise ValueError(
            "layer_types names sliding_attention, but use_sliding_window or sliding_window is not set"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)


def layer_kinds(hf: HfConfig, default: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """What each layer mixes tokens with: `layer_types`, or `default`. Raises UnsupportedModelError for kinds
    that are not `known`, ValueError for a wrong number of them.
    """
    kinds = tuple(hf.get("layer_types") or default)
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UnsupportedModelError(f"layer_types {', '.join(unknown)} are not supported for this family")
    if len(kinds) != len(default):
        raise ValueError(f"layer_types has {len(kinds)} entries for {len(default)} layers")
    return kinds


def rotary_of(hf: HfConfig, head_dim: int) -> tuple[Rotary, int]:
    """The rotary embedding, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`, and
    the longest context.

    YaRN checkpoints keep the trained length in `max_position_embeddings`; theirs is `factor` times the
    original length.
    """
    given: dict[str, Any] = dict(hf.get("rope_parameters") or {})
    given.update(hf.get("rope_scaling") or {})
    theta = float(given.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    share = float(given.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0)
    trained = int(hf["max_position_embeddings"])
    original = int(
        given.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings") or trained
    )
    scaling: Scaling
    longest = trained
    try:
        match kind:
            # dynamic NTK is the trained frequencies up to the trained length; no context here is longer
            case "default" | "dynamic":
                scaling = Unscaled()
            case "linear":
                scaling = LinearScaling(float(given["factor"]))
            case "llama3":
                scaling = Llama3Scaling(
                    factor=float(given["factor"]),
                    low_freq_factor=float(given["low_freq_factor"]),
                    high_freq_factor=float(given["high_freq_factor"]),
                    original_positions=original,
                )
            case "yarn":
                scaling = _yarn(given, original, trained)
                longest = max(trained, int(original * scaling.factor))
            case "factors":
                scaling = FactorScaling(tuple(float(factor) for factor in given["factors"]))
            case _:
                raise UnsupportedModelError(
                    f"rope_type {kind!r} is not supported; default, dynamic, linear, llama3 and yarn are"
                )
    except KeyError as error:
        raise ValueError(f"rope_type {kind!r} needs {error.args[0]!r} in the model's config") from error
    return Rotary(int(head_dim * share), theta, scaling), longest


def _yarn(given: Mapping[str, Any], original: int, trained: int) -> YarnScaling:
    factor = float(given.get("factor") or trained / original)
    attention = given.get("attention_factor")
    if attention is None:
        attention = yarn_attention_factor(factor, given.get("mscale"), given.get("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=float(attention),
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
    )
