"""Configurations: both spellings of rotary settings, windows, defaults, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quickturn.cache.layout import StateGroup
from quickturn.layers.rotary import Llama3Scaling, Rotary, cos_sin_table, frequencies
from quickturn.models.config import UnsupportedModelError, decoder_shape, rotary_of, window_layers
from quickturn.models.registry import architecture_of

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.9,
        "truncate": False,
    },
]


def config_of(**options: Any) -> dict[str, Any]:
    return TINY | {"architectures": ["LlamaForCausalLM"]} | options


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_rotary_tables_are_those_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    """Up to far positions, where a small error of a frequency shows."""
    options = {"head_dim": 128, "max_position_embeddings": 131072}
    hf = AutoConfig.for_model("llama", **(TINY | options), rope_parameters=scaling | {"rope_theta": theta})
    inverse, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](hf)
    rotary, longest = rotary_of(hf.to_dict(), 128)
    torch.testing.assert_close(frequencies(rotary), inverse, rtol=1e-6, atol=0)
    assert longest >= 131072
    table = cos_sin_table(rotary, 5000, torch.device("cpu"))
    angles = torch.arange(5000.0)[:, None].double() * inverse.double()
    expected = torch.cat((angles.cos(), angles.sin()), 1) * factor
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=2e-3)


def test_old_and_new_spellings_agree() -> None:
    for scaling in SCALINGS:
        new = rotary_of(config_of(rope_parameters=scaling | {"rope_theta": 5e5}), 64)
        assert rotary_of(config_of(rope_theta=5e5, rope_scaling=scaling), 64) == new
        kind = {key: value for key, value in scaling.items() if key != "rope_type"}
        assert (
            rotary_of(config_of(rope_theta=5e5, rope_scaling=kind | {"type": scaling["rope_type"]}), 64)
            == new
        )
    assert rotary_of(config_of(rope_scaling=None), 64)[0] == Rotary(64, 10000.0)
    assert rotary_of(config_of(partial_rotary_factor=0.5), 64)[0] == Rotary(32, 10000.0)
    llama = {key: value for key, value in SCALINGS[1].items() if key != "original_max_position_embeddings"}
    scaling = rotary_of(config_of(rope_scaling=llama), 64)[0].scaling
    assert isinstance(scaling, Llama3Scaling)
    assert scaling.original_positions == TINY["max_position_embeddings"]


def test_yarn_lengthens_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    hf = config_of(max_position_embeddings=32768, rope_scaling=yarn)
    assert architecture_of(hf).max_positions == 131072


def test_incomplete_scaling_names_the_key() -> None:
    with pytest.raises(ValueError, match="'low_freq_factor'"):
        rotary_of(config_of(rope_scaling={"rope_type": "llama3", "factor": 8.0}), 64)


def test_windows_of_qwen() -> None:
    hf = {"num_hidden_layers": 4, "sliding_window": 100, "max_window_layers": 2}
    assert window_layers(hf) == (0, 0, 0, 0)
    assert window_layers(hf | {"use_sliding_window": True}) == (0, 0, 100, 100)
    types = ["full_attention"] * 3 + ["sliding_attention"]
    assert window_layers(hf | {"use_sliding_window": True, "layer_types": types}) == (0, 0, 0, 100)
    assert window_layers(hf | {"layer_types": ["full_attention"] * 4}) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="use_sliding_window"):
        window_layers(hf | {"layer_types": types})
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        window_layers(hf | {"layer_types": ["linear_attention"] * 4})


def test_cache_groups() -> None:
    options = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "num_hidden_layers": 5,
    }
    groups = architecture_of(TINY | options | {"architectures": ["Qwen2ForCausalLM"]}).cache_groups()
    assert [(group.kind, group.layers, group.window) for group in groups] == [
        ("full", (0, 1), 0),
        ("window", (2, 3, 4), 8),
    ]
    assert {(group.kv_heads, group.head_dim) for group in groups} == {(2, 16)}


def test_architecture_is_found_by_class_or_type() -> None:
    assert architecture_of(TINY | {"model_type": "qwen3"}).family == "qwen3"
    assert architecture_of(TINY | {"architectures": ["Other", "Qwen2ForCausalLM"]}).family == "qwen2"
    with pytest.raises(
        UnsupportedModelError, match=r"model_type 'mamba' is not supported; .*Qwen3ForCausalLM"
    ):
        architecture_of(TINY | {"model_type": "mamba"})


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="lacks vocab_size, hidden_size"):
        decoder_shape({key: value for key, value in TINY.items() if key not in ("hidden_size", "vocab_size")})
    with pytest.raises(ValueError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        decoder_shape(TINY | {"num_key_value_heads": 3})
    assert (
        decoder_shape({key: value for key, value in TINY.items() if key != "num_key_value_heads"}).kv_heads
        == 4
    )


def test_cache_groups_of_hybrids() -> None:
    """Attention first, states last; the shapes are the published ones."""
    shapes = Path(__file__).parents[2] / "benchmarks/shapes"
    hf = json.loads((shapes / "qwen3.5-35b-a3b/config.json").read_text())
    full, state = architecture_of(hf).cache_groups()
    assert (full.kind, full.layers) == ("full", tuple(range(3, 40, 4)))
    assert isinstance(state, StateGroup)
    assert state.layers == tuple(index for index in range(40) if index % 4 != 3)
    assert (state.heads, state.key_dim, state.value_dim, state.channels, state.width) == (
        32,
        128,
        128,
        8192,
        4,
    )
    nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": hf}
    assert architecture_of(nested).cache_groups() == (full, state)
    local = architecture_of(
        TINY | {"model_type": "gemma3_text", "sliding_window": 9, "num_hidden_layers": 12}
    )
    assert [(group.kind, group.layers, group.window) for group in local.cache_groups()] == [
        ("full", (5, 11), 0),
        ("window", (0, 1, 2, 3, 4, 6, 7, 8, 9, 10), 9),
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gemma3_text", "hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gpt_oss", "num_local_experts": 4, "swiglu_limit": 5.0}, "swiglu_limit"),
        ({"model_type": "qwen3_5", "layer_types": ["full_attention"] * 2}, "2 entries for 3 layers"),
        ({"model_type": "qwen3_5", "layer_types": ["mamba"] * 3}, "mamba"),
        ({"model_type": "qwen3_5_moe_text", "num_experts": 4}, "lacks num_experts_per_tok"),
        ({"model_type": "gpt_oss"}, "lacks num_local_experts"),
    ],
)
def test_what_the_newer_families_refuse(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        architecture_of(TINY | config)
