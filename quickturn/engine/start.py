"""From a configuration to a runner that can take its first step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quickturn.cache.layout import ArenaLayout, plan_arena
from quickturn.config import EngineConfig
from quickturn.engine.memory import default_memory
from quickturn.engine.messages import EngineReady, LoadProgress
from quickturn.execution.runner import Runner
from quickturn.loading.load import load_model


@dataclass(frozen=True)
class StartedEngine:
    """All that the loop needs. `overlap`: plan the next step while one runs."""

    runner: Runner
    layout: ArenaLayout
    ready: EngineReady
    eos_token_ids: tuple[int, ...]
    overlap: bool
    weight_bytes_read: int
    """Weight bytes that every decode step reads: all but the rows of an input embedding of its own."""


def start(config: EngineConfig, progress: Callable[[LoadProgress], None]) -> StartedEngine:
    """Load the model, lay out the cache, allocate. Raises ValueError or MemoryError that say what to
    change.
    """
    device = pick_device(config.device)
    try:
        model, info = load_model(
            config, device, lambda stage, done, total: progress(LoadProgress(stage, done, total))
        )
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"the weights of {config.model} don't fit on {device}: use a smaller model or dtype, or free the"
            f" device's memory ({str(error).splitlines()[0]})"
        ) from error
    memory = default_memory(device) if config.memory is None else config.memory
    layout = plan_arena(
        model.cache_groups(),
        block_tokens=config.block_tokens,
        itemsize=info.dtype.itemsize,
        memory=memory,
        slab_bytes=config.slab_bytes,
    )
    max_context = min(info.max_context, layout.capacity_tokens())
    progress(LoadProgress("allocating the cache", 0, 0))
    runner = Runner(
        model,
        layout,
        dtype=info.dtype,
        device=device,
        max_requests=config.max_requests,
        max_context=max_context,
        vocab_size=model.vocab_size,
    )
    if device.type == "cuda" and config.graphs:
        runner.capture_graphs(lambda done, total: progress(LoadProgress("recording graphs", done, total)))
    ready = EngineReady(
        max_context=max_context,
        max_requests=config.max_requests,
        cache_tokens=layout.capacity_tokens(),
        block_tokens=layout.block_tokens,
        vocab_size=model.vocab_size,
        facts={
            "model": info.files.name,
            "parameters": f"{info.parameters / 1e6:.0f}M",
            "dtype": str(info.dtype).removeprefix("torch."),
            "device": str(device),
            "weights": f"{info.weight_bytes / 2**20:.0f} MiB",
            "cache": f"{layout.total_bytes / 2**20:.0f} MiB, {layout.capacity_tokens()} tokens",
            "least cacheable prefix": f"{layout.block_tokens} tokens",
        },
    )
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    tied = info.config.get("tie_word_embeddings", False)
    embedding = 0 if tied else model.vocab_size * model.architecture.hidden_size * info.dtype.itemsize
    return StartedEngine(runner, layout, ready, info.stop_token_ids, overlap, info.weight_bytes - embedding)


def pick_device(name: str) -> torch.device:
    """The device called `name`; 'auto' is the GPU if there is one. Raises ValueError for one that isn't
    there.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but PyTorch sees no GPU; use --device cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device
