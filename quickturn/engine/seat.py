"""One rank's place among several, as its engine sees it."""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch._C._distributed_c10d import Store, TCPStore

from quickturn.config import EngineConfig
from quickturn.parallel.collectives import Alone, Collectives
from quickturn.parallel.mesh import Mesh, make_mesh


def _new_key() -> bytes:
    return secrets.token_bytes(16)


def _own(value: int) -> int:
    return value


@dataclass(frozen=True)
class Seat:
    """`local_rank` of `local_ranks` on this machine. `hash_key` (16 bytes) is secret and equal on all ranks.
    `agree` gives the least of what every rank calls it with; all call it equally often.
    """

    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0
    local_rank: int = 0
    local_ranks: int = 1
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


def open_store(world: int, timeout: float) -> TCPStore:
    """The store by which ranks find each other, on a free port of the first one."""
    return TCPStore("0.0.0.0", 0, world, True, timedelta(seconds=timeout), wait_for_workers=False)


def join_store(host: str, port: int, world: int, timeout: float) -> TCPStore:
    """The store of the first rank."""
    return TCPStore(host, port, world, False, timedelta(seconds=timeout), wait_for_workers=False)


def open_process_group(
    store: Store, rank: int, world: int, device: torch.device, timeout: float, one_machine: bool
) -> None:
    """Make the default process group: gloo, and NCCL between GPUs. Returns when every rank did. Raises
    ValueError where there is one already.
    """
    if distributed.is_initialized():
        raise ValueError(
            "torch.distributed is in use in this process already: several ranks can't start in it"
        )
    if one_machine:
        # gloo would look up the machine's name, which not every machine can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def close_process_group() -> None:
    """Let go of it, if there is one."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def share_cores(device: torch.device, local_ranks: int) -> None:
    """Give each rank of this machine its part of the cores, unless the user said how many threads to take."""
    if device.type == "cpu" and local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // local_ranks))
