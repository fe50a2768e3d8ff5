"""One rank's place among several, as its engine sees it."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import TCPStore

from quickturn.config import EngineConfig
from quickturn.engine.device import pick_device
from quickturn.parallel.collectives import Alone, Collectives
from quickturn.parallel.communicator import connect
from quickturn.parallel.mesh import Mesh, make_mesh


def _new_key() -> bytes:
    return secrets.token_bytes(16)


def _own(value: int) -> int:
    return value


@dataclass(frozen=True)
class Seat:
    """`device` is its own, or that of `sharers` ranks; None: the one that the configuration names. `hash_key`
    (16 bytes) is secret and equal on all ranks. `agree` gives the least of what every rank calls it with; all
    call it equally often.
    """

    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0
    device: torch.device | None = None
    sharers: int = 1
    collectives: Collectives = field(default_factory=Alone)
    hash_key: bytes = field(default_factory=_new_key)
    agree: Callable[[int], int] = _own

    @property
    def group(self) -> int:
        """Which group of requests this rank belongs to."""
        return self.mesh.axis("dp").index(self.rank)


def mesh_of(config: EngineConfig) -> Mesh:
    """The mesh that a configuration asks for. Raises MeshError for sizes that make none."""
    return make_mesh(
        tp=config.tp,
        dp=config.dp,
        cp=config.cp,
        dense_tp=config.dense_tp,
        moe_tp=config.moe_tp,
        ep=config.ep,
    )


def require_free_process() -> None:
    """Raises ValueError where torch.distributed has a process group already: a process is a rank once."""
    if distributed.is_initialized():
        raise ValueError(
            "torch.distributed is in use in this process: several ranks can't start in it (close the other"
            " LLM, or take another process)"
        )


def open_store(world: int, timeout: float) -> TCPStore:
    """The store by which ranks find each other, on a free port of the first one."""
    return TCPStore("0.0.0.0", 0, world, True, timedelta(seconds=timeout), wait_for_workers=False)


def join_store(host: str, port: int, world: int, timeout: float) -> TCPStore:
    """The store of the first rank."""
    return TCPStore(host, port, world, False, timedelta(seconds=timeout), wait_for_workers=False)


def open_seat(
    config: EngineConfig,
    store: TCPStore,
    rank: int,
    local: tuple[int, int],
    hash_key: bytes,
    agree: Callable[[int], int],
) -> Seat:
    """Join the others: torch's process groups, a device for each rank. `local`: (this rank's number, ranks)
    on this machine. Returns when every rank is there.

    Raises MeshError, and ValueError for too few GPUs.
    """
    mesh = mesh_of(config)
    device = pick_device(config.device, *local, config.ranks_per_gpu)
    shared = device.type == "cuda" and config.ranks_per_gpu > 1
    share_cores(device, local[1])
    if local[1] == mesh.world:
        # gloo would look up the machine's name, which not every machine can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # A rank that fails before this is noticed here at once; what follows waits for it.
    agree(0)
    distributed.init_process_group(
        # NCCL refuses ranks that share a GPU.
        "gloo" if device.type == "cpu" or shared else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=mesh.world,
        timeout=timedelta(seconds=config.rank_timeout),
    )
    sharers = local[1] if device.type == "cpu" else min(config.ranks_per_gpu, local[1])
    collectives = connect(mesh, device, patience=config.rank_timeout)
    return Seat(mesh, rank, device, sharers, collectives, hash_key, agree)


def close_process_group() -> None:
    """Let go of it, if there is one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def share_cores(device: torch.device, local_ranks: int) -> None:
    """Give each rank of this machine its part of the cores, unless the user said how many threads to take."""
    if device.type == "cpu" and local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_ranks))
