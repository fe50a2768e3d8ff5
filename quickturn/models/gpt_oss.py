"""gpt-oss: attention with sinks, every other layer windowed, and mixtures of experts with biases."""

from dataclasses import dataclass, replace

from quickturn.layers.moe import Routing
from quickturn.models.base import Architecture
from quickturn.models.blocks import attend, decoder, qkv_proj
from quickturn.models.config import (
    DecoderShape,
    HfConfig,
    UnsupportedModelError,
    decoder_shape,
    layer_kinds,
    require,
)
from quickturn.models.declare import Declaration, Norm, Row
from quickturn.models.experts import Experts, Mix, of_experts
from quickturn.parallel.weights import MXFP4

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class GptOssConfig:
    """A decoder's shape, whether the maps of attention have biases, and how many experts there are and take
    part.
    """

    shape: DecoderShape
    attention_bias: bool
    experts: int
    top_k: int


def parse(hf: HfConfig) -> GptOssConfig:
    """The configuration in a Hugging Face config. Raises UnsupportedModelError for other activations."""
    if (hf.get("swiglu_alpha", 1.702), hf.get("swiglu_limit", 7.0)) != (1.702, 7.0):
        raise UnsupportedModelError(
            "swiglu_alpha other than 1.702 and swiglu_limit other than 7 are not supported"
        )
    method = (hf.get("quantization_config") or {}).get("quant_method")
    # Experts in MXFP4 are dequantised as they are read: nothing else of such a checkpoint is quantised.
    plain = {key: value for key, value in hf.items() if key != "quantization_config" or method != "mxfp4"}
    if not plain.get("rope_parameters") and not plain.get("rope_scaling"):
        plain["rope_parameters"] = YARN
    plain.setdefault("rope_theta", YARN["rope_theta"])
    require(hf, "num_local_experts", "num_hidden_layers")
    layers = int(hf["num_hidden_layers"])
    default = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    kinds = layer_kinds(hf, default, ("sliding_attention", "full_attention"))
    window = int(hf.get("sliding_window") or 128)
    shape = decoder_shape(
        plain,
        head_dim=64,
        default_eps=1e-5,
        windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        mixture=True,
    )
    return GptOssConfig(
        shape=shape,
        attention_bias=bool(hf.get("attention_bias", True)),
        experts=int(hf["num_local_experts"]),
        top_k=int(hf.get("num_experts_per_tok") or hf.get("experts_per_token") or 4),
    )


def architecture(hf: HfConfig) -> Architecture:
    """The model that a Hugging Face config describes."""
    config = parse(hf)
    return decoder("gpt_oss", config.shape, lambda index: decoder_layer(config, index), norm_kind="wide")


def decoder_layer(config: GptOssConfig, index: int) -> tuple[Declaration, ...]:
    """The steps of decoder layer `index`."""
    shape, bias = config.shape, config.attention_bias
    here = f"model.layers.{index}"
    attn, mlp = f"{here}.self_attn", f"{here}.mlp"
    mix = Mix(
        f"{mlp}.experts",
        router=f"{mlp}.router",
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        count=config.experts,
        routing=Routing(config.top_k, "softmax_after", normalize=False),
        experts=stored(f"{mlp}.experts", config.experts, shape.hidden, shape.intermediate),
        router_bias=True,
        activation="gpt_oss",
    )
    return (
        Norm(f"{here}.input_layernorm", shape.hidden, shape.eps, "attn", adds=index > 0, kind="wide"),
        qkv_proj(attn, shape, bias),
        replace(attend(attn, shape, index), sinks=f"{attn}.sinks"),
        Row(f"{attn}.o_proj", "attn", shape.heads * shape.head_dim, shape.hidden, bias),
        Norm(f"{here}.post_attention_layernorm", shape.hidden, shape.eps, "moe", kind="wide"),
        mix,
    )


def stored(module: str, count: int, hidden: int, intermediate: int) -> Experts:
    """Experts under `module`: as matrices that multiply from the right, `[E, H, 2I]` and `[E, I, H]`, or in
    MXFP4, `[E, 2I, H]` and `[E, H, I]`. Gate and up alternate.
    """
    both, every = 2 * intermediate, (0, hidden, 1)
    gate, up, inner = (0, both, 2), (1, both, 2), (0, intermediate, 1)
    wide, packed = f"{module}.gate_up_proj", f"{module}.gate_up_proj{MXFP4}"
    down, packed_down = f"{module}.down_proj", f"{module}.down_proj{MXFP4}"
    return Experts(
        gate_up=(
            of_experts(wide, (count, hidden, both), ((every, gate), (every, up)), swapped=True),
            of_experts(packed, (count, both, hidden), ((gate, every), (up, every))),
        ),
        down=(
            of_experts(down, (count, intermediate, hidden), ((inner, every),), swapped=True),
            of_experts(packed_down, (count, hidden, intermediate), ((every, inner),)),
        ),
        gate_up_bias=(of_experts(f"{wide}_bias", (count, both), ((gate,), (up,))),),
        down_bias=(of_experts(f"{down}_bias", (count, hidden), ((every,),)),),
    )
