"""A random checkpoint of a model with states, with a text side that has a token for each byte."""

from pathlib import Path
from typing import Any

import torch
from servers import Served, start_server
from tiny_text import write_tiny_text
from transformers import AutoConfig, AutoModelForCausalLM

MODEL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 9000,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-2,
}
"""Epsilon as in the other tiny models with states: a gated norm must not bring rounding errors up to size."""
ENGINE = {"dtype": "float32", "memory": 24 << 20, "served_model_name": "hybrid", "max_requests": 24}


def write_tiny_hybrid(folder: Path) -> Path:
    """The checkpoint in `folder`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **MODEL)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return write_tiny_text(folder)


def serve(folder: Path, **engine: Any) -> Served:
    """A server over it, with the real engine."""
    options = ENGINE | engine
    context = options.pop("max_context", None)
    return start_server(folder, core="quickturn.engine.core:EngineCore", engine=options, max_context=context)
