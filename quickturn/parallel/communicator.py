"""Collectives over torch.distributed: gloo between processes on CPUs, NCCL between GPUs.

The caller has initialised the default process group, whose ranks are the mesh's.
"""

from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as distributed
from quickturn_kernels import PeerMemory, Peers, add_rms_norm, all_reduce, all_reduce_add_rms_norm
from quickturn_kernels.ops.all_reduce.peer_memory import MAX_RANKS, has_kernel, mapped

from quickturn.parallel.collectives import Alone, Collectives, Counts, gathering
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

    def __init__(self, mesh: Mesh, made: ProcessGroups, first: int, device: torch.device | None) -> None:
        """See `connect`."""
        self._device = device
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
                memory = _peer_memory(over.index(self.rank), over.size, self._device, group)
                if memory is not None:
                    self._peers[over] = Peers(gathering(self, over), memory)

    def all_reduce(self, x: torch.Tensor, over: Groups) -> torch.Tensor:
        """See `Collectives`."""
        if over.size > 1:
            if self._small(x, over):
                return all_reduce(x, self._peers[over])
            x = x.contiguous()
            distributed.all_reduce(x, group=self._groups[over])
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
        gathered = x.new_empty((over.size, *x.shape))
        _GATHER(gathered.view(-1), x.contiguous().view(-1), group=self._groups[over])
        return _joined(gathered, dim, counts)

    def reduce_scatter(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """See `Collectives`."""
        if over.size == 1:
            return x
        parts = _parts(x, over.size, dim, counts)
        mine = parts.new_empty(parts.shape[1:])
        _SCATTER(mine.view(-1), parts.view(-1), group=self._groups[over])
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
        distributed.all_to_all_single(came, sent, group=self._groups[over])
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
            distributed.all_to_all_single(came, sent, group=self._groups[over])
        out, back = torch.stack((sent, came)).tolist()
        return out, back

    def dispatch(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """See `Collectives`."""
        if over.size == 1:
            return x
        found = x.new_empty((sum(came), *x.shape[1:]))
        group = self._groups[over]
        distributed.all_to_all_single(found, x.contiguous(), list(came), list(sent), group=group)
        return found

    def combine(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """See `Collectives`."""
        return self.dispatch(x, over, came, sent)

    def barrier(self) -> None:
        """See `Collectives`."""
        distributed.barrier(group=self._groups[Groups(self._world)])

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
) -> Collectives:
    """The collectives of this process, which every process of the default group must ask for at once.

    `device`: the GPU of this rank, so that small messages take a shorter way than NCCL's where GPUs see each
    other's memory. `made` keeps process groups for meshes to come. `first`: the rank in the default group
    that is rank 0 of the mesh; a default group with room for several meshes side by side may use them all.
    Raises ValueError if there is no room for one.
    """
    size, world = distributed.get_world_size(), mesh.world
    if first % world or first + world > size:
        raise ValueError(f"a mesh of {world} ranks from rank {first} on, but there are {size} processes")
    return Alone() if world == 1 else Communicator(mesh, made or ProcessGroups(), first, device)


def _peer_memory(
    index: int, size: int, device: torch.device | None, group: distributed.ProcessGroup
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
        return mapped(index, size, device, exchange)
    except RuntimeError:
        return None


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
