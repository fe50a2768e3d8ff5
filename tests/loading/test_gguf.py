"""GGUF files: every block format, the order of rows, the configuration, and files that are wrong."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import Sizes, random_tensors, write_gguf

from quickturn.config import EngineConfig
from quickturn.files.errors import LoadError
from quickturn.files.gguf_header import read_header
from quickturn.layers.rotary import Rotary, frequencies
from quickturn.loading.gguf import GgufSource
from quickturn.loading.load import load_model
from quickturn.models.config import UnsupportedModelError
from quickturn.models.registry import architecture_of

KINDS = [
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
    Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_format_is_read_exactly(tmp_path: Path, kind: Kind) -> None:
    sizes = Sizes()
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, "llama", sizes, random_tensors(sizes, "llama"), kind)
    source = GgufSource(path)
    assert source.shapes() == {name: tuple(tensor.shape) for name, tensor in meant.items()}
    for name, expected in meant.items():
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full(expected.shape, torch.nan, dtype=dtype)
            source.read_into(name, out)
            assert torch.equal(out, expected.to(dtype)), (name, dtype)


def test_large_tensors_are_dequantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quickturn.loading.dequantize._CHUNK", 1000)
    test_every_format_is_read_exactly(tmp_path, Kind.Q4_1)
    test_every_format_is_read_exactly(tmp_path, Kind.Q6_K)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_configuration_is_made_of_metadata(tmp_path: Path, family: str, tied: bool) -> None:
    sizes = Sizes()
    path = tmp_path / "model.gguf"
    write_gguf(path, family, sizes, random_tensors(sizes, family, tied), Kind.Q8_0)
    config = GgufSource(path).config
    assert config["tie_word_embeddings"] is tied
    assert config["eos_token_id"] == 2
    architecture = architecture_of(config)
    assert architecture.family == family
    assert architecture.vocab_size == sizes.vocab
    assert architecture.max_positions == sizes.context
    assert {step.head_dim for step in architecture.attention()} == {sizes.head_dim}
    model, info = load_model(EngineConfig(str(path), dtype="float32"), torch.device("cpu"))
    assert model.vocab_size == sizes.vocab
    assert info.stop_token_ids == (2,)
    assert info.files.format == "gguf"


def test_rotary_scaling(tmp_path: Path) -> None:
    sizes = Sizes()
    tensors = random_tensors(sizes, "qwen3")
    yarn: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    write_gguf(tmp_path / "yarn.gguf", "qwen3", sizes, tensors, metadata=yarn)
    architecture = architecture_of(GgufSource(tmp_path / "yarn.gguf").config)
    assert architecture.max_positions == 256
    factors = torch.linspace(1.0, 8.0, sizes.head_dim // 2)
    path = tmp_path / "factors.gguf"
    write_gguf(path, "llama", sizes, random_tensors(sizes, "llama") | {"rope_freqs.weight": factors})
    model, _ = load_model(EngineConfig(str(path), dtype="float32"), torch.device("cpu"))
    rotary = model.architecture.attention()[0].rotary
    torch.testing.assert_close(frequencies(rotary), frequencies(Rotary(sizes.head_dim, 10000.0)) / factors)
    write_gguf(tmp_path / "odd.gguf", "qwen3", sizes, tensors, metadata={"rope.scaling.type": "longrope"})
    with pytest.raises(LoadError, match="longrope"):
        GgufSource(tmp_path / "odd.gguf")


def test_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    sizes = Sizes()
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", sizes, random_tensors(sizes, "llama"), Kind.Q4_0, {"x.y": "text", "x.z": 0.5})
    header, reader = read_header(path), gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.metadata[name] == field.contents()
    assert [(name, tensor.ggml_type, tensor.offset) for name, tensor in header.tensors.items()] == [
        (tensor.name, int(tensor.tensor_type), tensor.data_offset) for tensor in reader.tensors
    ]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    sizes = Sizes(layers=1)
    path = tmp_path / "model.gguf"
    tensors = random_tensors(sizes, "llama")
    write_gguf(path, "llama", sizes, tensors, Kind.Q8_0)
    data = path.read_bytes()
    for bad, message in (
        (b"", "empty"),
        (b"junk" * 20, "not a GGUF"),
        (data[:700], "cut off"),
        (data[:-4000], "cut off"),
    ):
        path.write_bytes(bad)
        with pytest.raises(LoadError, match=message):
            load_model(EngineConfig(str(path)), torch.device("cpu"))
    write_gguf(path, "mamba", sizes, tensors)
    with pytest.raises(LoadError, match=r"'mamba'.*llama, qwen2, qwen3"):
        GgufSource(path)
    write_gguf(path, "llama", sizes, tensors, metadata={"expert_count": 8})
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        load_model(EngineConfig(str(path)), torch.device("cpu"))
    write_gguf(path, "llama", sizes, tensors, metadata={"split.count": 3})
    with pytest.raises(LoadError, match="one of 3 parts"):
        GgufSource(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    write_gguf(path, "llama", sizes, tensors)
    with pytest.raises(LoadError, match=r"lacks 1 of .*mlp\.up_proj\.weight"):
        load_model(EngineConfig(str(path)), torch.device("cpu"))


def test_the_embedded_model_loads_without_transformers() -> None:
    pytest.importorskip("gguf")
    code = (
        "import sys, torch\n"
        "from quickturn.config import EngineConfig\n"
        "from quickturn.loading.load import load_model\n"
        "model, info = load_model(EngineConfig('embedded'), torch.device('cpu'))\n"
        "assert info.parameters == 134515008, info\n"
        "assert model.cache_groups()[0].layers == tuple(range(30))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
