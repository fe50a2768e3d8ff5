"""Checkpoints of hybrids and mixtures: the ways in which they store the same weights, and what is kept
wide.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import OPTIONS, TINY, random_checkpoint
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quickturn.config import EngineConfig
from quickturn.files.errors import LoadError
from quickturn.loading.checkpoint import SafetensorsSource
from quickturn.loading.load import load_model
from quickturn.loading.mxfp4 import MxfpSource, dequantize
from quickturn.loading.parameters import choose, read
from quickturn.loading.source import RenamedSource
from quickturn.models.registry import architecture_of

CPU = torch.device("cpu")


def parameters(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every parameter as declared, by name."""
    architecture = architecture_of(json.loads((folder / "config.json").read_text()))
    source = MxfpSource(RenamedSource(SafetensorsSource(folder), architecture.prefixes, architecture.ignored))
    specs = choose(architecture.weights(), source.shapes())
    return {spec.name: read(spec, source, dtype, CPU) for spec in specs}


def saved(folder: Path, option: str) -> dict[str, torch.Tensor]:
    """Write the option's random checkpoint; its tensors."""
    random_checkpoint(*OPTIONS[option]).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> None:
    """Other tensors, and another config, in the folder's files."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("option", ["qwen3.5", "qwen3.5-moe", "gemma3"])
def test_a_text_model_inside_a_larger_one(tmp_path: Path, option: str) -> None:
    """Nested config, prefixed names; the parts that see images or draft tokens are passed over."""
    tensors = saved(tmp_path, option)
    expected = parameters(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {"qwen3.5": "Qwen3_5", "qwen3.5-moe": "Qwen3_5Moe", "gemma3": "Gemma3"}[option]
    config = {
        "architectures": [f"{outer}ForConditionalGeneration"],
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "tie_word_embeddings": text.get("tie_word_embeddings", option == "gemma3"),
    }
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    for name in ("mtp.fc.weight", "model.visual.patch.weight", "model.vision_tower.patch.weight"):
        if name.startswith("model.vision_tower") == (option == "gemma3"):
            renamed[name] = torch.ones(3, 3)
    rewrite(tmp_path, renamed, config)
    same(parameters(tmp_path), expected)
    load_model(EngineConfig(str(tmp_path), dtype="float32"), CPU)


@pytest.mark.parametrize("option", ["qwen3-next", "qwen3.5-moe", "qwen3-moe"])
def test_experts_split_or_fused(tmp_path: Path, option: str) -> None:
    tensors = saved(tmp_path, option)
    first = parameters(tmp_path)
    fused = any(name.endswith("experts.gate_up_proj") for name in tensors)
    other = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, rest = name.partition(".experts.")
        if not rest:
            continue
        if fused:
            for expert, matrix in enumerate(tensor):
                one = f"{module}.experts.{expert}"
                if rest == "down_proj":
                    other[f"{one}.down_proj.weight"] = matrix
                else:
                    other[f"{one}.gate_proj.weight"], other[f"{one}.up_proj.weight"] = matrix.chunk(2)
        elif rest.endswith("down_proj.weight"):
            stacks.setdefault(f"{module}.experts.down_proj", []).append(tensor)
        elif rest.endswith("gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            stacks.setdefault(f"{module}.experts.gate_up_proj", []).append(torch.cat((tensor, up)))
    other |= {name: torch.stack(matrices) for name, matrices in stacks.items()}
    rewrite(tmp_path, other)
    same(parameters(tmp_path), first)
    del other[next(name for name in other if "down_proj" in name and "experts" in name)]
    rewrite(tmp_path, other)
    with pytest.raises(LoadError, match="lacks"):
        load_model(EngineConfig(str(tmp_path), dtype="float32"), CPU)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 8, 2), generator=generator, dtype=torch.uint8)
    # Theirs is transposed for products from the right.
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(dequantize(blocks, scales), expected)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Packed experts give the parameters that the same numbers give when they are stored as floats."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    random_checkpoint("gpt_oss", OPTIONS["gpt-oss"][1] | sizes).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    generator = torch.Generator().manual_seed(2)
    plain, packed = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors[name].shape
        blocks = torch.randint(
            0, 256, (count, rows, columns // 32, 16), generator=generator, dtype=torch.uint8
        )
        scales = torch.randint(120, 128, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
        plain[name] = dequantize(blocks, scales).transpose(1, 2)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    rewrite(tmp_path, plain)
    expected = parameters(tmp_path)
    rewrite(tmp_path, packed, config | {"quantization_config": {"quant_method": "mxfp4"}})
    same(parameters(tmp_path), expected)
    load_model(EngineConfig(str(tmp_path), dtype="float32"), CPU)


def test_what_must_stay_wide_does(tmp_path: Path) -> None:
    """In a bfloat16 model: norms that store their weight less one, the decay, the time step."""
    tensors = saved(tmp_path, "qwen3.5")
    loaded = parameters(tmp_path, torch.bfloat16)
    layer = "model.layers.0"
    for name in (f"{layer}.input_layernorm.weight", "model.norm.weight"):
        assert torch.equal(loaded[name], tensors[name] + 1)
    for name in (f"{layer}.linear_attn.A_log", f"{layer}.linear_attn.dt_bias"):
        assert torch.equal(loaded[name], tensors[name])
    for name in (f"{layer}.linear_attn.norm.weight", f"{layer}.linear_attn.conv1d.weight"):
        assert loaded[name].dtype == torch.bfloat16
        assert torch.equal(loaded[name], tensors[name].to(torch.bfloat16).view(loaded[name].shape))


@pytest.mark.parametrize("option", ["qwen3-next", "qwen3.5-moe", "qwen3-moe", "gemma3", "gpt-oss"])
def test_dummy_weights(tmp_path: Path, option: str) -> None:
    """Every family runs without a checkpoint; norms scale by one however they are stored."""
    kind, options = OPTIONS[option]
    config = AutoConfig.for_model(kind, **(TINY | options))
    config.architectures = [
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}.get(kind, "")
    ]
    if not config.architectures[0]:
        config.architectures = None
    config.save_pretrained(tmp_path)
    model, info = load_model(EngineConfig(str(tmp_path), dtype="float32", load_format="dummy"), CPU)
    assert info.parameters > 10_000
    norms = [step.run for step in model.steps if "norm" in step.name]
    assert norms
    for norm in norms:
        assert (norm.weight == 1).all()  # type: ignore[attr-defined]
