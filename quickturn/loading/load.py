"""The one way to get a model that can run: name in, model out."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from quickturn_kernels import LinearWeight

from quickturn.config import EngineConfig, Quantization
from quickturn.files.errors import LoadError
from quickturn.files.resolve import ModelFiles, resolve
from quickturn.loading.checkpoint import SafetensorsSource, read_config
from quickturn.loading.dtype import resolve_dtype
from quickturn.loading.dummy import DummySource
from quickturn.loading.fp8 import Fp8Source
from quickturn.loading.mxfp4 import MxfpSource
from quickturn.loading.parameters import load_parameters
from quickturn.loading.source import RenamedSource, TensorSource
from quickturn.models.base import Architecture, Model, Ranks, build
from quickturn.models.config import stored_in_fp8, text_config
from quickturn.models.plan import programs_of
from quickturn.models.registry import architecture_of
from quickturn.parallel.collectives import Collectives
from quickturn.parallel.shards import Place

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""


@dataclass(frozen=True)
class LoadedInfo:
    """What was loaded.

    `config` is the Hugging Face config (for GGUF: made from its metadata). `max_context`: tokens that
    positions reach. `stop_token_ids`: end-of-sequence tokens of config and generation config.
    `weight_bytes` counts a tied weight once, `expert_bytes` the stacks of experts among it. `cache_scales`:
    of keys and values in a cache in e4m3, of the decoder layers that the checkpoint states them for.
    """

    files: ModelFiles
    config: dict[str, Any]
    dtype: torch.dtype
    max_context: int
    stop_token_ids: tuple[int, ...]
    parameters: int
    weight_bytes: int
    expert_bytes: int
    seconds: float
    cache_scales: dict[int, tuple[float, float]]


def declared_model(config: EngineConfig) -> Architecture:
    """The declared model that `config` names, of which no weight is read. Raises LoadError if it can't be
    found, UnsupportedModelError if no model file serves it.
    """
    return architecture_of(_open(resolve(config.model, config.load_format))[1])


def load_model(
    config: EngineConfig,
    device: torch.device,
    progress: Progress | None = None,
    place: Place | None = None,
    collectives: Collectives | None = None,
) -> tuple[Model, LoadedInfo]:
    """The model that `config` names, on `device`, ready to run; with `place` and `collectives` that rank's
    share of it, in step with all other ranks, which load theirs.

    Raises LoadError if it can't be found or its weights don't fit it, UnsupportedModelError if no model file
    serves it, ValueError if `max_context` is longer than the model allows, PlacementError if the ranks can't
    share it out.
    """
    started = time.perf_counter()
    files = resolve(config.model, config.load_format)
    source, hf = _open(files)
    architecture = architecture_of(hf)
    count = sum(spec.rows * (spec.columns or 1) for spec in architecture.weights())
    ranks = None
    if place is not None and collectives is not None:
        ranks = Ranks(programs_of(architecture, place.mesh), collectives)
        collectives.use(ranks.programs.groups())
        architecture = architecture.dispatching(ranks.programs.dispatched)
    specs = architecture.weights()
    max_context = _max_context(architecture, config.max_context)
    dtype = resolve_dtype(config.dtype, device)
    quantization = _quantization(config, files, hf, dtype, device)
    if source is None:
        source = DummySource(specs, config.seed, place)
    else:
        source = MxfpSource(RenamedSource(source, architecture.prefixes, architecture.ignored))
    source = Fp8Source(source)
    label = f"loading {files.name}"

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(label, done * dtype.itemsize, total * dtype.itemsize)

    parameters = load_parameters(specs, source, dtype, device, report, quantization, place)
    own = architecture if place is None else architecture.on(place)
    model = build(own, parameters, max_context, device, ranks)
    tied = architecture.vocab_size * architecture.hidden_size if architecture.tied else 0
    held = {id(parameter): _bytes(parameter) for parameter in parameters.values()}
    info = LoadedInfo(
        files=files,
        config=hf,
        dtype=dtype,
        max_context=max_context,
        stop_token_ids=_stop_token_ids(files.path, hf),
        parameters=count - tied,
        weight_bytes=sum(held.values()),
        expert_bytes=sum(_bytes(parameters[spec.name]) for spec in specs if spec.use == "experts"),
        seconds=time.perf_counter() - started,
        cache_scales=source.cache_scales(),
    )
    return model, info


def _quantization(
    config: EngineConfig, files: ModelFiles, hf: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> Quantization:
    """How matrices are kept, `auto` resolved. Raises ValueError for formats that the dtype doesn't go
    with.
    """
    fp8 = stored_in_fp8(text_config(hf))
    chosen = config.quantization
    if chosen == "auto":
        fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        chosen = "stored" if fp8 and fast else "none"
    gguf = chosen == "stored" and files.path.is_file()
    if (gguf or chosen in ("int8", "int4")) and dtype != torch.bfloat16:
        raise ValueError(f"quantization {chosen} computes in bfloat16, but the dtype is {dtype}")
    # Random weights have no stored form: they are made in the one that the config states.
    return "fp8" if chosen == "stored" and fp8 and files.format == "dummy" else chosen


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
