"""Collectives over torch.distributed: gloo between processes on CPUs, NCCL between GPUs; between ranks that
share a GPU, which NCCL refuses, gloo by way of the host.

The caller has initialised the default process group, whose ranks are the mesh's.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as distributed
from quickturn_kernels import (
    PeerMemory,
    Peers,
    add_rms_norm,
    all_gather,
    all_reduce,
    all_reduce_add_rms_norm,
)
from quickturn_kernels.ops.all_reduce.peer_memory import MAX_RANKS, PATIENCE_S, has_kernel, mapped

from quickturn.parallel.collectives import Alone, Collectives, Counts, gathering
from quickturn.parallel.exchange import recorded
from quickturn.parallel.mesh import Groups, Mesh, MeshAxis

# torch 2.13 renamed them.
_GATHER: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_SCATTER: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


class ProcessGroups:
    """torch's process groups by their ranks, each made once."""

    def __init__(self) -> None:
        """None is made yet."""
        self._made: dict[tuple[int, ...], distributed.ProcessGroup] = {}

    def of(self, groups: Iterable[Sequence[int]], rank: int) -> distributed.ProcessGroup | None:
        """The group among `groups` that global rank `rank` is in; None if it's alone there, or in none.

        Every process of the default group must call this with the same groups in the same order.
        """
        found = None
        for members in groups:
            key = tuple(members)
            if len(key) == 1:
                continue
            if key not in self._made:
                self._made[key] = distributed.new_group(list(key))
            if rank in key:
                found = self._made[key]
        return found


class Communicator:
    """A rank's collectives, one process group for each kind of group of ranks."""

    def __init__(
        self, mesh: Mesh, made: ProcessGroups, first: int, device: torch.device | None, patience: float
    ) -> None:
        """See `connect`."""
        self._device, self._patience = device, patience
        self._copies = 0
        self._peers: dict[Groups, Peers] = {}
        self.rank = distributed.get_rank() - first
        self._made = made
        self._world = mesh.world
        self._starts = range(first % mesh.world, distributed.get_world_size() - mesh.world + 1, mesh.world)
        self._first = first
        self._groups: dict[Groups, distributed.ProcessGroup] = {}
        self.use(mesh.axis(name) for name in get_args(MeshAxis))

    def use(self, groups: Iterable[Groups]) -> None:
        """See `Collectives`."""
        for over in dict.fromkeys(groups):
            every = [
                [start + member for member in group]
                for start in self._starts
                for group in over.all(self._world)
            ]
            group = self._made.of(every, self.rank + self._first)
            if group is not None and over not in self._groups:
                self._groups[over] = group
                memory = _peer_memory(over.index(self.rank), over.size, self._device, group, self._patience)
                if memory is not None:
                    self._peers[over] = Peers(gathering(self, over), memory)

    def all_reduce(self, x: torch.Tensor, over: Groups) -> torch.Tensor:
        """See `Collectives`."""
        if over.size > 1:
            if self._small(x, over):
                return all_reduce(x, self._peers[over])
            x = x.contiguous()
            self._call(lambda found, sent, group: distributed.all_reduce(found, group=group), x, x, over)
        return x

    def all_gather(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """See `Collectives`."""
        if over.size == 1:
            return x
        most = None if counts is None else max(counts)
        if most is not None and x.shape[0] < most:
            x = _padded(x, most)
        x = x.contiguous()
        peers = self._peers.get(over)
        if peers is not None and peers.memory is not None and peers.memory.carries(x):
            return _joined(all_gather(x, peers), dim, counts)
        gathered = x.new_empty((over.size, *x.shape))
        self._call(_GATHER, gathered.view(-1), x.view(-1), over)
        return _joined(gathered, dim, counts)

    def reduce_scatter(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """See `Collectives`."""
        if over.size == 1:
            return x
        parts = _parts(x, over.size, dim, counts)
        mine = parts.new_empty(parts.shape[1:])
        self._call(_SCATTER, mine.view(-1), parts.view(-1), over)
        return mine if counts is None else mine[: counts[over.index(self.rank)]]

    def all_to_all(
        self,
        x: torch.Tensor,
        over: Groups,
        split_dim: int,
        concat_dim: int,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        """See `Collectives`."""
        if over.size == 1:
            return x
        split = None if counts is None or split_dim else counts
        if counts is not None and split is None:
            x = _padded(x, max(counts))
        sent = _parts(x, over.size, split_dim, split)
        came = torch.empty_like(sent)
        self._call(distributed.all_to_all_single, came, sent, over)
        if split is not None:
            came = came[:, : split[over.index(self.rank)]]
        return _joined(came, concat_dim, counts if split is None else None)

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, over: Groups
    ) -> torch.Tensor:
        """See `Collectives`."""
        if self._small(x, over):
            return all_reduce_add_rms_norm(x, residual, weight, eps, self._peers[over])
        return add_rms_norm(self.all_reduce(x, over), residual, weight, eps)

    def reduce_scatter_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        over: Groups,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        """See `Collectives`."""
        return add_rms_norm(self.reduce_scatter(x, over, 0, counts), residual, weight, eps)

    def exchange_counts(self, sent: torch.Tensor, over: Groups) -> tuple[Counts, Counts]:
        """See `Collectives`."""
        came = torch.empty_like(sent) if over.size > 1 else sent
        if over.size > 1:
            self._call(distributed.all_to_all_single, came, sent, over)
        out, back = torch.stack((sent, came)).tolist()
        return out, back

    def dispatch(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """See `Collectives`."""
        if over.size == 1:
            return x
        found = x.new_empty((sum(came), *x.shape[1:]))
        exchange = partial(
            distributed.all_to_all_single, output_split_sizes=list(came), input_split_sizes=list(sent)
        )
        self._call(exchange, found, x.contiguous(), over)
        return found

    def combine(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """See `Collectives`."""
        return self.dispatch(x, over, came, sent)

    def barrier(self) -> None:
        """See `Collectives`."""
        distributed.barrier(group=self._groups[Groups(self._world)])

    @property
    def copies(self) -> int:
        """See `Collectives`."""
        return self._copies

    def missing(self) -> str:
        """See `Collectives`."""
        for over, peers in self._peers.items():
            index = None if peers.memory is None else peers.memory.missing()
            if index is not None:
                return f"rank {over.members(self.rank)[index]} did not come to a sum in {self._patience:g} s"
        return ""

    def abandon(self) -> None:
        """See `Collectives`."""
        for peers in self._peers.values():
            if peers.memory is not None:
                peers.memory.abandon()
        if "nccl" in distributed.get_backend():
            for group in self._groups.values():
                group.abort()

    def _call(
        self, call: Callable[..., object], found: torch.Tensor, sent: torch.Tensor, over: Groups
    ) -> None:
        """One collective of torch's; gloo is given copies on the host of what is on a GPU."""
        group = self._groups[over]
        if not (_on_gpu(sent) and distributed.get_backend(group) == "gloo"):
            call(found, sent, group=group)
            return
        if recorded(sent):
            raise RuntimeError(
                "ranks that share a GPU can't record this step: a message is larger than the memory that they"
                " share takes; lower max_requests or max_step_tokens, or give graphs=False"
            )
        self._copies += 1
        there = sent.cpu()
        here = there if found is sent else torch.empty_like(found, device="cpu")
        call(here, there, group=group)
        found.copy_(here)

    def _small(self, x: torch.Tensor, over: Groups) -> bool:
        """Whether the ranks sum x over memory that they map into each other."""
        peers = self._peers.get(over)
        return peers is not None and peers.memory is not None and peers.memory.takes(x)


def connect(
    mesh: Mesh,
    device: torch.device | None = None,
    *,
    made: ProcessGroups | None = None,
    first: int = 0,
    patience: float = PATIENCE_S,
) -> Collectives:
    """The collectives of this process, which every process of the default group must ask for at once.

    `device`: the GPU of this rank, so that small messages take a shorter way than NCCL's where GPUs see each
    other's memory. `made` keeps process groups for meshes to come. `first`: the rank in the default group
    that is rank 0 of the mesh; a default group with room for several meshes side by side may use them all.
    `patience`: seconds that a kernel of ours waits for other ranks.

    Raises ValueError if there is no room for one.
    """
    size, world = distributed.get_world_size(), mesh.world
    if first % world or first + world > size:
        raise ValueError(f"a mesh of {world} ranks from rank {first} on, but there are {size} processes")
    return Alone() if world == 1 else Communicator(mesh, made or ProcessGroups(), first, device, patience)


def _peer_memory(
    index: int,
    size: int,
    device: torch.device | None,
    group: distributed.ProcessGroup,
    patience: float,
) -> PeerMemory | None:
    """Memory that the ranks of a group map into each other; None where there is no kernel for it, or where
    any of them can't.
    """
    if device is None or device.type != "cuda" or size > MAX_RANKS or not has_kernel(device):
        return None

    def exchange(said: bytes) -> list[bytes]:
        heard: list[bytes] = [b""] * size
        distributed.all_gather_object(heard, said, group=group)
        return heard

    try:
        return mapped(index, size, device, exchange, patience)
    except RuntimeError:
        return None


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """x with zeros behind it, `length` long."""
    if x.shape[0] == length:
        return x
    longer = x.new_zeros((length, *x.shape[1:]))
    longer[: x.shape[0]] = x
    return longer


def _parts(x: torch.Tensor, number: int, dim: int, counts: Counts | None) -> torch.Tensor:
    """x cut along `dim`, contiguous: `[number, ...]`, parts of `counts` padded to the longest."""
    if counts is None or len(set(counts)) == 1:
        dim %= x.ndim
        shape = (*x.shape[:dim], number, x.shape[dim] // number, *x.shape[dim + 1 :])
        return x.reshape(shape).movedim(dim, 0).contiguous()
    most = max(counts)
    return torch.stack([_padded(part, most) for part in x.split_with_sizes(list(counts))])


def _joined(parts: torch.Tensor, dim: int, counts: Counts | None) -> torch.Tensor:
    """The parts `[number, ...]` one behind the other along `dim`, each as long as `counts` says."""
    if counts is not None and len(set(counts)) > 1:
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    dim %= parts.ndim - 1
    return parts.movedim(0, dim).flatten(dim, dim + 1)
