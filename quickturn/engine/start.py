"""From a configuration to a runner that can take its first step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import quickturn_control as control
import torch

from quickturn.cache.layout import ArenaLayout, CacheDtypes, plan_arena
from quickturn.config import EngineConfig
from quickturn.engine.device import pick_device as pick_device
from quickturn.engine.memory import default_memory, room_for
from quickturn.engine.messages import EngineReady, LoadProgress
from quickturn.engine.seat import Seat
from quickturn.execution.runner import Runner
from quickturn.loading.load import LoadedInfo, load_model
from quickturn.models.base import Architecture
from quickturn.parallel.shards import Place

GRAPH_DEVICES = ("cuda",)
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights that a decode step may read: `dense` by all, and of each mixture of experts
    (expert count, experts a token takes, bytes of all).
    """

    dense: int
    mixtures: tuple[tuple[int, int, int], ...]

    def read_by(self, rows: int) -> int:
        """What a step of `rows` tokens reads, each weight once, if the experts were drawn evenly."""
        total = float(self.dense)
        for count, taken, size in self.mixtures:
            total += size * (1 - (1 - taken / count) ** rows)
        return int(total)


@dataclass(frozen=True)
class StartedEngine:
    """All that the loop needs. `overlap`: plan the next step while one runs."""

    runner: Runner
    layout: ArenaLayout
    ready: EngineReady
    eos_token_ids: tuple[int, ...]
    overlap: bool
    weights: WeightBytes


def start(config: EngineConfig, progress: Callable[[LoadProgress], None], seat: Seat) -> StartedEngine:
    """Load the model (of several ranks: this one's share), lay out the cache, allocate. Raises ValueError or
    MemoryError that say what to change.
    """
    device = seat.device or pick_device(config.device)
    with room_for(
        f"the weights of {config.model} on {device}",
        "use a smaller model, --dtype bfloat16 or --quantization fp8, or free the device's memory",
    ):
        model, info = load_model(
            config,
            device,
            lambda stage, done, total: progress(LoadProgress(stage, done, total)),
            *((Place(seat.mesh, seat.rank), seat.collectives) if seat.mesh.world > 1 else ()),
        )
    seat.agree(0)  # all have loaded their weights, also those that share this device
    memory = default_memory(device, seat.sharers) if config.memory is None else config.memory
    memory = seat.agree(memory)
    kv_dtype = torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else info.dtype
    layout = plan_arena(
        model.cache_groups(),
        block_tokens=config.block_tokens,
        dtypes=CacheDtypes(kv=kv_dtype, state=STATE_DTYPES[config.state_dtype], conv=info.dtype),
        memory=memory,
        slab_bytes=config.slab_bytes,
    )
    max_context = min(info.max_context, layout.capacity_tokens())
    progress(LoadProgress("allocating the cache", 0, 0))
    with room_for(
        f"the tables of {config.max_requests} requests of {max_context} tokens beside a cache of"
        f" {layout.total_bytes / 2**30:.2f} GiB",
        "lower --memory, --max-requests or --max-context",
    ):
        runner = Runner(
            model,
            layout,
            device=device,
            max_requests=config.max_requests,
            max_context=max_context,
            vocab_size=model.vocab_size,
            cache_scales=info.cache_scales,
        )
    why = _no_graphs(runner, config, seat) if config.graphs else "not wanted"
    records = device.type in GRAPH_DEVICES
    slow = 0
    if records and not why:
        with room_for(
            f"graphs of decode steps of up to {config.max_requests} rows",
            f"lower --memory (the cache takes {layout.total_bytes / 2**30:.2f} GiB) or --max-requests",
        ):
            slow = runner.capture_graphs(
                config.max_step_tokens,
                lambda done, total: progress(LoadProgress("recording graphs", done, total)),
                seat.mesh.dp,
                seat.agree,
            )
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
            **_rank_facts(seat, device),
            **({"graphs": f"none: {why}"} if records and why else {}),
            **({"mixed steps": f"{slow} graphs left out: recording took too long"} if slow else {}),
            "weights": f"{info.weight_bytes / 2**20:.0f} MiB",
            "cache": f"{layout.total_bytes / 2**20:.0f} MiB, {layout.capacity_tokens()} tokens",
            **_state_facts(layout),
            "least cacheable prefix": f"{layout.block_tokens} tokens",
        },
    )
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    weights = _weight_bytes(model.architecture, info)
    return StartedEngine(runner, layout, ready, info.stop_token_ids, overlap, weights)


def scheduler_config(
    config: EngineConfig,
    layout: ArenaLayout,
    max_context: int,
    depth: int,
    hash_key: bytes,
    recorded: Sequence[tuple[int, int]] = (),
) -> control.SchedulerConfig:
    """What the control plane is told. `depth`: steps that may be out at once. `recorded`: of the recorded
    steps that mix, decode rows and tokens in all.
    """
    return control.SchedulerConfig(
        groups=[
            control.GroupConfig(laid.group.kind, laid.blocks_per_slab, window=laid.group.window)
            for laid in layout.groups
        ],
        num_slabs=layout.num_slabs,
        block_tokens=layout.block_tokens,
        max_requests=config.max_requests,
        max_step_tokens=config.max_step_tokens,
        max_context=max_context,
        prefix_cache=config.prefix_cache,
        pipeline_depth=depth,
        recorded=recorded,
        policy=control.Policy(
            min_tps_per_user=config.min_tps_per_user,
            max_ttft=config.max_ttft,
            max_pause=config.max_pause,
            pause_every=config.pause_every,
            checkpoint_tail=config.checkpoint_tail,
            checkpoint_stride=config.checkpoint_stride,
        ),
        hash_key=hash_key,
        model_salt=config.model,
    )


def _no_graphs(runner: Runner, config: EngineConfig, seat: Seat) -> str:
    """Why no step can be recorded as a graph; all ranks call this at once."""
    if config.ranks_per_gpu > 1 and seat.mesh.world > 1:
        copies = seat.collectives.copies
        runner.rehearse_graphs(config.max_step_tokens, seat.mesh.dp)
        if seat.collectives.copies > copies:
            return "ranks that share a GPU exchange tensors by way of the host"
    return ""


def _rank_facts(seat: Seat, device: torch.device) -> dict[str, str]:
    if seat.mesh.world == 1:
        return {}
    shared = device.type == "cuda" and seat.sharers > 1
    return {"ranks": f"{seat.mesh.world}: {seat.mesh}" + (f", {seat.sharers} on each GPU" if shared else "")}


def _state_facts(layout: ArenaLayout) -> dict[str, str]:
    """How large a state is, beside the tokens that would take its room."""
    sizes = [laid.block_bytes for laid in layout.groups if laid.group.kind == "state"]
    tokens = [laid.block_bytes for laid in layout.groups if laid.group.kind == "full"]
    if not sizes:
        return {}
    worth = sum(sizes) * layout.block_tokens // max(1, sum(tokens))
    return {"state": f"{sum(sizes) / 2**20:.2f} MiB each, as much as {worth} tokens of keys and values"}


def _weight_bytes(architecture: Architecture, info: LoadedInfo) -> WeightBytes:
    size = info.dtype.itemsize
    # Of an input embedding of its own a step reads a few rows.
    embedding = 0 if architecture.tied else architecture.vocab_size * architecture.hidden_size * size
    sizes = [mix.count * mix.intermediate * mix.hidden for mix in architecture.mixtures()]
    mixtures = tuple(
        (mix.count, mix.routing.top_k, info.expert_bytes * elements // sum(sizes))
        for mix, elements in zip(architecture.mixtures(), sizes, strict=True)
    )
    return WeightBytes(info.weight_bytes - embedding - info.expert_bytes, mixtures)
