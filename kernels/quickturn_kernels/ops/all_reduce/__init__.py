"""Sums over ranks, one process each, with the norm that follows; for messages so small that latency is all.

Whatever computes it, summands are added in the order of the ranks, in float32, and rounded once: every rank
gets the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quickturn_kernels.ops.all_reduce.peer_memory import PeerMemory
from quickturn_kernels.registry import Op, define

__all__ = ["PeerMemory", "Peers", "all_gather", "all_reduce", "all_reduce_add_rms_norm"]


@dataclass(frozen=True)
class Peers:
    """The ranks of a group, as one of them sees them.

    `gather(x)`: what each of them gives, `[ranks, *x.shape]`, in their order. `memory`: what GPUs of one host
    map of each other, None where they can't.
    """

    gather: Callable[[Tensor], Tensor]
    memory: PeerMemory | None = None


_ALL_GATHER: Op[Callable[[Tensor, Peers], Tensor]] = define("all_gather", "memory")
_ALL_REDUCE: Op[Callable[[Tensor, Peers], Tensor]] = define("all_reduce", "memory")
_NORMED: Op[Callable[[Tensor, Tensor, Tensor, float, Peers], Tensor]] = define(
    "all_reduce_add_rms_norm", "memory"
)


def all_gather(x: Tensor, peers: Peers) -> Tensor:
    """What each rank gives, `[ranks, *x.shape]`, in their order.

    x: of any shape and dtype, contiguous, the same on every rank, which call this in the same order.
    """
    key = (x.device, x.dtype, peers.memory is not None)
    function = _ALL_GATHER.table.get(key)
    if function is None:
        function = _ALL_GATHER.bind(*key)
    return function(x, peers)


def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """The sum of the ranks' x, on each of them.

    x: [T, H] of a float dtype, the last dim contiguous. Every rank calls this with the same shape, in the
    same order of calls. Returns a new [T, H] of x.dtype.
    """
    key = (x.device, x.dtype, peers.memory is not None)
    function = _ALL_REDUCE.table.get(key)
    if function is None:
        function = _ALL_REDUCE.bind(*key)
    return function(x, peers)


def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """`add_rms_norm(all_reduce(x, peers), residual, weight, eps)`: x and residual [T, H], the latter changed
    in place; weight [H].
    """
    key = (x.device, x.dtype, peers.memory is not None)
    function = _NORMED.table.get(key)
    if function is None:
        function = _NORMED.bind(*key)
    return function(x, residual, weight, eps, peers)
