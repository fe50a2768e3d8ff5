"""The one way to get a model that can run: name in, model out."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quickturn_kernels import LinearWeight

from quickturn.config import EngineConfig
from quickturn.files.errors import LoadError
from quickturn.files.resolve import ModelFiles, resolve
from quickturn.loading.checkpoint import SafetensorsSource, read_config
from quickturn.loading.dtype import resolve_dtype
from quickturn.loading.dummy import DummySource
from quickturn.loading.mxfp4 import MxfpSource
from quickturn.loading.parameters import load_parameters
from quickturn.loading.source import RenamedSource, TensorSource
from quickturn.models.base import Architecture, Model, build
from quickturn.models.config import text_config
from quickturn.models.registry import architecture_of

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""


@dataclass(frozen=True)
class LoadedInfo:
    """What was loaded.

    `config` is the Hugging Face config (for GGUF: made from its metadata). `max_context`: tokens that
    positions reach. `stop_token_ids`: end-of-sequence tokens of config and generation config. `weight_bytes`
    counts a tied weight once.
    """

    files: ModelFiles
    config: dict[str, Any]
    dtype: torch.dtype
    max_context: int
    stop_token_ids: tuple[int, ...]
    parameters: int
    weight_bytes: int
    seconds: float


def load_model(
    config: EngineConfig, device: torch.device, progress: Progress | None = None
) -> tuple[Model, LoadedInfo]:
    """The model that `config` names, on `device`, ready to run.

    Raises LoadError if it can't be found or its weights don't fit it, UnsupportedModelError if no model file
    serves it, ValueError if `max_context` is longer than the model allows.
    """
    started = time.perf_counter()
    files = resolve(config.model, config.load_format)
    source, hf = _open(files)
    architecture = architecture_of(hf)
    specs = architecture.weights()
    max_context = _max_context(architecture, config.max_context)
    if source is None:
        source = DummySource(specs, config.seed)
    else:
        source = MxfpSource(RenamedSource(source, architecture.prefixes, architecture.ignored))
    dtype = resolve_dtype(config.dtype, device)
    if config.quantization != "none" and dtype != torch.bfloat16:
        raise ValueError(f"quantization {config.quantization} computes in bfloat16, but the dtype is {dtype}")
    label = f"loading {files.name}"

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(label, done * dtype.itemsize, total * dtype.itemsize)

    parameters = load_parameters(specs, source, dtype, device, report, config.quantization)
    model = build(architecture, parameters, max_context, device)
    tied = architecture.vocab_size * architecture.hidden_size if architecture.tied else 0
    count = sum(spec.rows * (spec.columns or 1) for spec in specs) - tied
    held = {id(parameter): _bytes(parameter) for parameter in parameters.values()}
    info = LoadedInfo(
        files=files,
        config=hf,
        dtype=dtype,
        max_context=max_context,
        stop_token_ids=_stop_token_ids(files.path, hf),
        parameters=count,
        weight_bytes=sum(held.values()),
        seconds=time.perf_counter() - started,
    )
    return model, info


def _open(files: ModelFiles) -> tuple[TensorSource | None, dict[str, Any]]:
    """Tensors (None for dummy weights) and Hugging Face config of a model."""
    if files.path.is_file():
        from quickturn.loading.gguf import GgufSource

        source = GgufSource(files.path)
        return (None if files.format == "dummy" else source), source.config
    hf = read_config(files.path)
    return (None if files.format == "dummy" else SafetensorsSource(files.path)), hf


def _max_context(architecture: Architecture, wanted: int | None) -> int:
    longest = architecture.max_positions
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_context is {wanted}, but the model allows {longest} tokens")
    return wanted or longest


def _bytes(parameter: torch.Tensor | LinearWeight) -> int:
    tensors = (parameter,) if isinstance(parameter, torch.Tensor) else parameter.tensors
    return sum(tensor.nbytes for tensor in tensors)


def _stop_token_ids(path: Path, hf: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    given = hf.get("eos_token_id", text_config(hf).get("eos_token_id"))
    if generation.exists():
        try:
            given = json.loads(generation.read_text()).get("eos_token_id", given)
        except json.JSONDecodeError as error:
            raise LoadError(f"{generation} is not valid JSON: {error}") from None
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (int(given),)
