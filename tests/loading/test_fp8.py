"""Checkpoints in fp8, in every form that they are published in, against float32 weights made of them by the
definition; and caches in e4m3.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quickturn_kernels import LinearWeight
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest
from quickturn.loading.checkpoint import SafetensorsSource, read_config
from quickturn.loading.fp8 import Fp8Source
from quickturn.loading.load import load_model
from quickturn.loading.parameters import load_parameters
from quickturn.models.config import UnsupportedModelError
from quickturn.models.registry import architecture_of
from quickturn.sampling_params import SamplingParams

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}},
    "ignore": ["lm_head"],
}
FORMS = {"blocks": BLOCKS, "tensor": TENSOR, "modelopt": MODELOPT, "channel": CHANNEL}


def quantize(weight: torch.Tensor, form: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors that a checkpoint of this form keeps of a matrix, by ending; and the numbers they mean."""
    rows, columns = weight.shape
    tall, wide = {"blocks": (128, 128), "channel": (1, columns)}.get(form, (rows, columns))
    scale = torch.empty(-(-rows // tall), -(-columns // wide))
    stored, meant = torch.empty(rows, columns, dtype=E4M3), torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide))
            # Not the best scale but a foreign one: nothing may be quantised anew on the way.
            scale[i, j] = weight[at].abs().max() / 400
            stored[at] = (weight[at] / scale[i, j]).to(E4M3)
            meant[at] = stored[at].float() * scale[i, j]
    if form == "blocks":
        return {"": stored, "_scale_inv": scale}, meant
    extra = {} if form == "channel" else {"input": torch.tensor(0.01)}
    return {"": stored, "_scale": scale if form == "channel" else scale.reshape(())} | extra, meant


def write(
    directory: Path, form: str, cache_scales: bool = False, **sizes: Any
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """A random Qwen3 in this form; the transformers model of the numbers that it means, in float32."""
    torch.manual_seed(7)
    config = AutoConfig.for_model("qwen3", **SIZES | sizes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors, meant = {}, {}
    for name, tensor in model.state_dict().items():
        # Rows of unlike sizes, so that scales differ.
        spread = tensor * (1 + 3 * torch.rand(tensor.shape[0], 1)) if tensor.ndim == 2 else tensor
        if name.endswith("proj.weight"):
            parts, meant[name] = quantize(spread, form)
            for ending, part in parts.items():
                key = name.replace(".weight", ".input_scale") if ending == "input" else name + ending
                tensors[key] = part.clone()
        else:
            tensors[name] = meant[name] = spread.clone()
    if cache_scales:
        for layer in range(config.num_hidden_layers):
            tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(0.02 * (layer + 1))
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([0.05])
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    stated = json.loads(config.to_json_string()) | {
        "architectures": ["Qwen3ForCausalLM"],
        "quantization_config": FORMS[form],
    }
    (directory / "config.json").write_text(json.dumps(stated))
    model.load_state_dict(meant)
    return model, meant


def parameters(directory: Path, quantization: Any) -> dict[str, torch.Tensor | LinearWeight]:
    specs = architecture_of(read_config(directory)).weights()
    source = Fp8Source(SafetensorsSource(directory))
    return load_parameters(specs, source, torch.float32, CPU, None, quantization)


def floats(weight: LinearWeight) -> torch.Tensor:
    """What a kept matrix means, by the definition of its layout."""
    if weight.layout == "plain":
        return weight.tensors[0].float()
    stored, scale = weight.tensors
    if weight.layout == "fp8_channel":
        return stored.float() * scale[:, None]
    rows, columns = weight.shape
    spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return stored.float() * spread


PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


@pytest.mark.parametrize("form", FORMS)
def test_kept_matrices_mean_what_the_checkpoint_says(tmp_path: Path, form: str) -> None:
    """To the bit, through fusion: each part keeps its own scales."""
    _, meant = write(tmp_path, form)
    loaded = parameters(tmp_path, "stored")
    for whole, parts in PARTS.items():
        weight = loaded[f"model.layers.1.{whole}.weight"]
        assert isinstance(weight, LinearWeight)
        assert weight.layout == ("fp8_block" if form == "blocks" else "fp8_channel")
        assert weight.tensors[0].dtype == E4M3
        expected = torch.cat([meant[f"model.layers.1.{part}.weight"] for part in parts])
        torch.testing.assert_close(floats(weight), expected, rtol=0, atol=0)
    head = loaded["lm_head.weight"]
    assert isinstance(head, LinearWeight)
    assert head.layout == "plain" or head.tensors[0].dtype != E4M3


def test_blocks_that_dont_meet_are_dequantised(tmp_path: Path) -> None:
    """Heads of 32: k ends in the middle of a block of q|k|v."""
    _, meant = write(tmp_path, "blocks", head_dim=32)
    loaded = parameters(tmp_path, "stored")
    fused = loaded["model.layers.0.self_attn.qkv_proj.weight"]
    assert isinstance(fused, LinearWeight)
    assert fused.tensors[0].dtype == torch.float32
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    torch.testing.assert_close(floats(fused), torch.cat([meant[name] for name in names]), rtol=0, atol=0)
    kept = loaded["model.layers.0.mlp.gate_up_proj.weight"]
    assert isinstance(kept, LinearWeight)
    assert kept.layout == "fp8_block"


def logits(directory: Path, prompt: list[int], **options: Any) -> tuple[list[int], np.ndarray]:
    """Greedy tokens of the engine, and the first one's logprobs of all tokens."""
    core = EngineCore(
        EngineConfig(str(directory), dtype="float32", memory=8 << 20, block_tokens=4, **options)
    )
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=20)
    core.add(AddRequest(1, np.array(prompt, np.int32).tobytes(), sampling, 0.0))
    tokens: list[int] = []
    first: dict[int, float] = {}
    while core.has_work():
        for output in core.step().outputs:
            tokens += output.tokens
            if not first and output.logprobs:
                first = dict(output.logprobs[0].top)
    core.close()
    table = np.full(SIZES["vocab_size"], np.nan)
    table[list(first)] = list(first.values())
    return tokens, table


def close(got: np.ndarray, want: np.ndarray, atol: float) -> bool:
    """Of the likeliest tokens that both name."""
    both = ~np.isnan(got) & ~np.isnan(want)
    return bool(both.sum() >= 10) and bool(np.abs(got - want)[both].max() < atol)


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_model(tmp_path: Path, form: str) -> None:
    """Dequantised it is transformers' model; kept, x is rounded to e4m3 as well, which moves logprobs a
    little.
    """
    reference, _ = write(tmp_path, form)
    prompt = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).numpy()
    _, dequantised = logits(tmp_path, prompt, quantization="none")
    assert close(dequantised, expected, 1e-3)
    _, kept = logits(tmp_path, prompt, quantization="stored")
    assert close(kept, expected, 0.5)
    assert not close(kept, expected, 1e-4)


def test_transformers_reads_blocks_alike(tmp_path: Path) -> None:
    """The oracle's numbers are those that transformers dequantises to (it wants whole blocks)."""
    reference, _ = write(tmp_path, "blocks", hidden_size=256)
    ids = torch.randint(0, 300, (1, 40), generator=torch.Generator().manual_seed(1))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(ids).logits, reference(ids).logits, rtol=1e-2, atol=1e-2)


def test_quantised_at_load(tmp_path: Path) -> None:
    """Matrices that were floats, but neither head nor embedding; random weights too."""
    write(tmp_path, "blocks")
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, plain = load_model(EngineConfig(str(tmp_path), load_format="dummy", dtype="float32"), CPU)
    _, fp8 = load_model(
        EngineConfig(str(tmp_path), load_format="dummy", dtype="float32", quantization="fp8"), CPU
    )
    matrices = sum(
        spec.rows * (spec.columns or 0)
        for spec in architecture_of(config).weights()
        if spec.use == "linear" and spec.axis != "vocab"
    )
    assert 2.9 * matrices < plain.weight_bytes - fp8.weight_bytes < 3 * matrices


def test_scales_of_the_cache(tmp_path: Path) -> None:
    write(tmp_path, "tensor", cache_scales=True)
    _, info = load_model(EngineConfig(str(tmp_path), dtype="float32"), CPU)
    assert info.cache_scales == {
        0: (pytest.approx(0.02), pytest.approx(0.05)),
        1: (pytest.approx(0.04), pytest.approx(0.05)),
    }


@pytest.mark.parametrize("cache_scales", [False, True])
def test_a_cache_in_e4m3(tmp_path: Path, cache_scales: bool) -> None:
    """Close to the float32 cache; the same tokens whether the prompt is fed whole or in pieces."""
    write(tmp_path, "blocks", cache_scales)
    prompt = torch.randint(0, 300, (70,), generator=torch.Generator().manual_seed(2)).tolist()
    _, expected = logits(tmp_path, prompt, quantization="none")
    tokens, got = logits(tmp_path, prompt, quantization="none", kv_cache_dtype="fp8")
    assert close(got, expected, 0.5)
    assert not close(got, expected, 1e-4)
    pieces, _ = logits(tmp_path, prompt, quantization="none", kv_cache_dtype="fp8", max_step_tokens=9)
    assert pieces == tokens


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", ["blocks", "channel"])
def test_on_a_gpu(tmp_path: Path, form: str, dtype: str) -> None:
    """Matrices and cache in e4m3; recorded decode steps give the tokens that launched ones give."""
    reference, _ = write(tmp_path, form, hidden_size=256, head_dim=128)
    prompt = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).numpy()
    options = {"dtype": dtype, "memory": 64 << 20, "block_tokens": 64, "kv_cache_dtype": "fp8"}
    tokens, got = logits(tmp_path, prompt, **options)
    assert close(got, expected, 0.5)
    assert logits(tmp_path, prompt, **options, graphs=False)[0] == tokens


@pytest.mark.parametrize(("intermediate", "kept"), [(128, True), (192, False)])
def test_experts(tmp_path: Path, intermediate: int, kept: bool) -> None:
    """A mixture as Qwen publishes it: stacks stay in e4m3 where blocks meet experts, else become floats."""
    torch.manual_seed(7)
    sizes = SIZES | {"hidden_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    config = AutoConfig.for_model("qwen3_moe", **sizes, moe_intermediate_size=intermediate)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors, meant = {}, {}
    for name, tensor in reference.state_dict().items():
        if ".experts." in name:
            stack = torch.empty_like(tensor)
            for expert, matrix in enumerate(tensor):
                gated = name.endswith("gate_up_proj")
                for part, rows in zip(
                    ("gate", "up") if gated else ("down",), matrix.chunk(1 + gated), strict=True
                ):
                    stored, stack[expert].chunk(1 + gated)[part == "up"][:] = quantize(rows, "blocks")
                    key = name.rsplit(".", 1)[0] + f".{expert}.{part}_proj.weight"
                    tensors |= {key + ending: value.clone() for ending, value in stored.items()}
            meant[name] = stack
        else:
            tensors[name] = meant[name] = tensor.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    stated = {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config.to_json_string()) | stated))
    reference.load_state_dict(meant)
    loaded = parameters(tmp_path, "stored")
    stacks = [name for name in loaded if name.endswith((".gate_up", ".down"))]
    assert len(stacks) == 4
    for name in stacks:
        weight = loaded[name]
        assert isinstance(weight, torch.Tensor)
        assert (weight.dtype == E4M3) == kept == (f"{name}.scale" in loaded)
    prompt = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).numpy()
    for quantization, atol in (("none", 1e-3), ("stored", 0.3), ("fp8", 0.3)):
        assert close(logits(tmp_path, prompt, quantization=quantization)[1], expected, atol)


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": "awq"},
        BLOCKS | {"weight_block_size": [64, 64]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        CHANNEL | {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 8}}}},
    ],
)
def test_other_kinds_are_refused(tmp_path: Path, stated: dict[str, Any]) -> None:
    write(tmp_path, "blocks")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": stated}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="not supported; take one in fp8"):
        load_model(EngineConfig(str(tmp_path)), CPU)
