"""Tiny random checkpoints, made with transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quickturn.config import EngineConfig
from quickturn.loading.load import load_model
from quickturn.models.base import Model

TINY: dict[str, Any] = {
    "vocab_size": 198,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}

MIXTURE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-2,
}
"""With an epsilon that counts: where a query happens to be at right angles to what a state holds, the gated
norm brings a sum that is next to nothing, and its rounding errors, up to size one. With 1e-6 one token in a
hundred thousand was 1e-2 from transformers' logits, which are as far from those in float64.
"""
GEMMA: dict[str, Any] = {
    "head_dim": 24,
    "query_pre_attn_scalar": 30,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

MILD: dict[str, Any] = {"initializer_range": 0.2}
"""For families that scale attention's scores up, as YaRN does. With the others' weights their softmax falls
between one-hot answers, and where two keys are level a layer makes a rounding error ten times as large:
float32 was 4e-4 from float64 at such tokens, transformers' as well as ours.
"""

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-head-dim": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        MILD
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn-mscale": (
        "llama",
        MILD
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.5,
                "mscale_all_dim": 0.7,
                "beta_fast": 8,
                "beta_slow": 2,
                "truncate": False,
            }
        },
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-moe": ("qwen3_moe", MIXTURE | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3-moe-mixed": ("qwen3_moe", MIXTURE | {"head_dim": 16, "mlp_only_layers": [1]}),
    "qwen3-next": ("qwen3_next", HYBRID | MIXTURE | {"norm_topk_prob": True}),
    "qwen3-next-dense": ("qwen3_next", HYBRID | MIXTURE | {"decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3.5": ("qwen3_5_text", HYBRID),
    "qwen3.5-tied": ("qwen3_5_text", HYBRID | {"tie_word_embeddings": True, "linear_num_key_heads": 4}),
    "qwen3.5-small": (
        "qwen3_5_text",
        HYBRID
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", HYBRID | MIXTURE),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3-softcap": (
        "gemma3_text",
        GEMMA
        | {
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        MILD | {"head_dim": 16, "sliding_window": 7, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}


def random_checkpoint(model_type: str, options: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A float32 model whose logits are far from uniform, with biases and norm weights that matter."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(TINY | {"initializer_range": 0.3} | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model.eval()


def load(path: Path | str, **options: Any) -> Model:
    """Our model of a path in float32 on the CPU."""
    config = EngineConfig(str(path), **({"dtype": "float32"} | options))
    return load_model(config, torch.device("cpu"))[0]


def random_checkpoints(folder: Path) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """A function from an entry of `OPTIONS` to its random checkpoint: the directory, under `folder`, in which
    it was saved, and the model; each is made once.
    """
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(option: str) -> tuple[Path, PreTrainedModel]:
        if option not in made:
            reference = random_checkpoint(*OPTIONS[option])
            reference.save_pretrained(folder / option)
            made[option] = folder / option, reference
        return made[option]

    return make
