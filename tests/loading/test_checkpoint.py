"""Safetensors directories: shards, dtypes, wrong names and shapes, and how much memory loading takes."""

import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from gguf_files import Sizes, random_tensors
from safetensors.torch import save_file

from quickturn.config import EngineConfig
from quickturn.files.errors import LoadError
from quickturn.loading import parameters
from quickturn.loading.checkpoint import SafetensorsSource
from quickturn.loading.load import load_model
from quickturn.models.config import UnsupportedModelError
from quickturn.models.registry import architecture_of

SIZES = Sizes(hidden=32, intermediate=48, head_dim=8, heads=4, kv_heads=2)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": SIZES.vocab,
    "hidden_size": SIZES.hidden,
    "intermediate_size": SIZES.intermediate,
    "num_hidden_layers": SIZES.layers,
    "num_attention_heads": SIZES.heads,
    "num_key_value_heads": SIZES.kv_heads,
    "max_position_embeddings": SIZES.context,
    "eos_token_id": 7,
}


def write(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    config: dict[str, Any] | None = None,
    shards: int = 1,
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    names = list(tensors)
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors")
        return directory
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


def load(directory: Path, **options: Any) -> dict[str, torch.Tensor]:
    """All parameters, matrices as they were before they were laid out for the kernels."""
    architecture = architecture_of(json.loads((directory / "config.json").read_text()))
    with mock.patch.object(parameters, "prepare_linear", options.get("prepare", lambda weight: weight)):
        loaded = parameters.load_parameters(
            architecture.weights(),
            SafetensorsSource(directory),
            torch.float32,
            torch.device("cpu"),
            options.get("progress"),
        )
    assert all(isinstance(value, torch.Tensor) for value in loaded.values())
    return cast(dict[str, torch.Tensor], loaded)


def load_whole(directory: Path, **options: Any) -> Any:
    return load_model(EngineConfig(str(directory), **options), torch.device("cpu"))


@pytest.mark.parametrize("shards", [1, 3])
def test_segments_are_fused_and_cast(tmp_path: Path, shards: int) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in random_tensors(SIZES, "llama").items()}
    loaded = load(write(tmp_path, tensors, shards=shards))
    here = "model.layers.1.self_attn"
    qkv = torch.cat([tensors[f"{here}.{part}_proj.weight"] for part in "qkv"]).float()
    assert torch.equal(loaded[f"{here}.qkv_proj.weight"], qkv)
    mlp = "model.layers.0.mlp"
    gate_up = torch.cat([tensors[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")]).float()
    assert torch.equal(loaded[f"{mlp}.gate_up_proj.weight"], gate_up)
    assert torch.equal(loaded["model.norm.weight"], tensors["model.norm.weight"].float())
    assert torch.equal(loaded["lm_head.weight"], tensors["lm_head.weight"].float())


def test_a_tied_head_is_read_once(tmp_path: Path) -> None:
    tensors = random_tensors(SIZES, "llama", tied=True)
    directory = write(tmp_path, tensors, {"tie_word_embeddings": True})
    loaded = load(directory)
    assert torch.equal(loaded["lm_head.weight"], tensors["model.embed_tokens.weight"])
    _, info = load_whole(directory)
    assert info.parameters == sum(tensor.numel() for tensor in tensors.values())
    stale = tensors | {"lm_head.weight": torch.zeros(SIZES.vocab, SIZES.hidden)}
    loaded = load(write(tmp_path / "stale", stale, {"tie_word_embeddings": True}))
    assert torch.equal(loaded["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_names_that_do_not_match_are_told(tmp_path: Path) -> None:
    tensors = random_tensors(SIZES, "llama")
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load(write(tmp_path / "buffers", tensors | buffers))
    missing = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    with pytest.raises(LoadError, match=r"lacks 2 of .*layers\.0\.mlp\.up_proj.*layers\.1\.mlp\.up_proj"):
        load_whole(write(tmp_path / "missing", missing))
    with pytest.raises(LoadError, match=r"no place for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_whole(
            write(tmp_path / "extra", tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
        )
    with pytest.raises(LoadError, match=r"embed_tokens.weight is \[40, 32\] instead of \[41, 32\]"):
        load_whole(write(tmp_path / "shape", tensors, {"vocab_size": 41}))


def test_directories_that_are_not_models(tmp_path: Path) -> None:
    tensors = random_tensors(SIZES, "llama")
    directory = write(tmp_path / "shards", tensors, shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match=r"missing.*model-00002-of-00003"):
        load_whole(directory)
    directory = write(tmp_path / "cut", tensors)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(LoadError, match="cannot read"):
        load_whole(directory)
    file.unlink()
    with pytest.raises(LoadError, match=r"no \*\.safetensors"):
        load_whole(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(LoadError, match="not valid JSON"):
        load_whole(directory)


def test_models_that_are_not_built(tmp_path: Path) -> None:
    tensors = random_tensors(SIZES, "llama")
    for config, message in (
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*LlamaForCausalLM, Qwen2ForCausalLM"),
        (
            {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 8},
            "Qwen2MoeForCausalLM is not supported",
        ),
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            load_whole(write(tmp_path / "model", tensors, config))


def test_stop_tokens_and_longest_context(tmp_path: Path) -> None:
    directory = write(tmp_path, random_tensors(SIZES, "llama"))
    _, info = load_whole(directory)
    assert (info.stop_token_ids, info.max_context) == ((7,), 128)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    _, info = load_whole(directory, max_context=50)
    assert (info.stop_token_ids, info.max_context) == ((7, 9), 50)
    with pytest.raises(ValueError, match="max_context is 129, but the model allows 128"):
        load_whole(directory, max_context=129)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(
        write(tmp_path, random_tensors(SIZES, "llama")),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1


def test_only_parameters_in_work_exist_twice(tmp_path: Path) -> None:
    """With kernels that lay every matrix out anew, no more originals live at once than there are workers."""
    alive: set[int] = set()
    most = 0

    def lay_out(weight: torch.Tensor) -> torch.Tensor:
        nonlocal most
        key = id(weight)
        alive.add(key)
        weakref.finalize(weight, alive.discard, key)
        most = max(most, len(alive))
        return weight.clone()

    sizes = Sizes(hidden=32, intermediate=48, head_dim=8, heads=4, kv_heads=2, layers=12)
    directory = write(tmp_path, random_tensors(sizes, "llama"), {"num_hidden_layers": 12})
    load(directory, prepare=lay_out)
    assert 1 <= most <= parameters.WORKERS
