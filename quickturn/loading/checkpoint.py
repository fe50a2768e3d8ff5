"""Hugging Face checkpoints: `model.safetensors`, or shards listed in `model.safetensors.index.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from quickturn.files.errors import LoadError
from quickturn.loading.source import box, take
from quickturn.parallel.weights import Cut

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_config(directory: Path) -> dict[str, Any]:
    """The `config.json` of a model directory. Raises LoadError if it is missing or not JSON."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise LoadError(f"{directory} has no config.json, so it isn't a model directory") from None
    except json.JSONDecodeError as error:
        raise LoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise LoadError(f"{path} does not hold a JSON object")
    return config


class SafetensorsSource:
    """The tensors of a checkpoint directory, memory-mapped: only what is asked for is read, and no page is
    read twice.
    """

    def __init__(self, directory: Path) -> None:
        """Opens every shard. Raises LoadError for shards that are missing or damaged."""
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(directory):
            try:
                file: Any = safe_open(str(path), framework="pt", device="cpu")
                for name in file.keys():  # noqa: SIM118 - it is not a dict
                    self._files[name] = file
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise LoadError(f"cannot read {path}: {error}") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """None: nothing here is quantised."""
        return None

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """Copy tensor `name`, or that part of it, to `out`, casting on the way."""
        if cut is None:
            out.copy_(self._files[name].get_tensor(name))
            return
        sides, rest = box(cut, (1,) * len(cut.shape))
        part = self._files[name].get_slice(name)[tuple(slice(*side) for side in sides)]
        out.copy_(take(part, rest).reshape(out.shape))


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        missing = [name for name in names if not (directory / name).exists()]
        if missing:
            raise LoadError(f"{INDEX} lists shards that are missing from {directory}: {', '.join(missing)}")
        return [directory / name for name in names]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        raise LoadError(f"{directory} has no *.safetensors file; other weight formats (*.bin) are not read")
    return found
