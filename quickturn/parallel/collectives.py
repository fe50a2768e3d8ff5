"""What ranks can do together: the collectives that a compiled program calls, and those of one rank alone.

`over` says which ranks take part: those that `over.members(rank)` lists, in that order. Where ranks have
different numbers of tokens (requests of their own), `counts` are those numbers in the order of the group,
zero included, known to every rank beforehand: what travels is padded to the largest, what comes back is not.
Every rank gets the same bits.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from quickturn_kernels import add_rms_norm

from quickturn.parallel.mesh import Groups

Counts = Sequence[int]
"""Tokens (size of dim 0) of each rank of a group."""


class Collectives(Protocol):
    """A rank's side of them. None but `exchange_counts` waits for the device, so that a CUDA graph can record
    them.

    Tensors are of any float or integer dtype unless said otherwise; results are new unless said otherwise.
    """

    @property
    def rank(self) -> int:
        """This rank in the mesh."""

    @property
    def copies(self) -> int:
        """How many collectives so far went by way of the host: no graph can record a step with one."""

    def missing(self) -> str:
        """If a kernel gave up waiting for another rank, which one; then all that the device was to compute
        since is lost. Else nothing.
        """

    def abandon(self) -> None:
        """Another rank is gone: what waits for it on the device gives up. Any thread may call this."""

    def use(self, groups: Iterable[Groups]) -> None:
        """Gets ready for groups of ranks that aren't an axis of the mesh, those of a program. Every rank
        calls it, before any graph is recorded.
        """

    def all_reduce(self, x: torch.Tensor, over: Groups) -> torch.Tensor:
        """The sum over the ranks, on each of them; may reuse x's memory."""

    def all_gather(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """The ranks' tensors one behind the other along `dim`. With `counts`, `dim` is 0."""

    def reduce_scatter(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """This rank's part along `dim` of the sum over the ranks. Parts are equal, or `counts` long with
        `dim` 0.
        """

    def all_to_all(
        self,
        x: torch.Tensor,
        over: Groups,
        split_dim: int,
        concat_dim: int,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        """Part i along `split_dim` goes to rank i; what comes lies along `concat_dim` in the order of the
        ranks. With `counts` one of the dims is 0, and that one is cut, or put together, in such parts.
        """

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, over: Groups
    ) -> torch.Tensor:
        """`add_rms_norm(all_reduce(x), residual, weight, eps)`: x and residual `[T, H]`, the latter changed
        in place.
        """

    def reduce_scatter_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        over: Groups,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        """`add_rms_norm(reduce_scatter(x), residual, weight, eps)`, scattered over tokens: residual and
        result are of this rank's tokens.
        """

    def exchange_counts(self, sent: torch.Tensor, over: Groups) -> tuple[Counts, Counts]:
        """`sent`, int64 `[ranks]`: the rows that this rank will send to each. Both that and what each will
        send to this one, on the host, which waits for it.
        """

    def dispatch(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """The first `sent[0]` rows of x to the first rank, and so on; what comes, `came[i]` rows of rank i,
        lies in the order of the ranks. Rows may be of any contents, `sent` and `came` are of this rank.
        """

    def combine(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """The way back from `dispatch` with the same numbers: x has a row for each that came, the result one
        for each that was sent, both in the order of then.
        """

    def barrier(self) -> None:
        """Returns when every rank of the mesh has called it."""


class Alone:
    """One rank: nothing to do."""

    rank = 0
    copies = 0

    def missing(self) -> str:
        """Nobody is waited for."""
        return ""

    def abandon(self) -> None:
        """Nobody is waited for."""

    def use(self, groups: Iterable[Groups]) -> None:
        """Every group is of one."""

    def all_reduce(self, x: torch.Tensor, over: Groups) -> torch.Tensor:
        """x."""
        return x

    def all_gather(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """x."""
        return x

    def reduce_scatter(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        """x."""
        return x

    def all_to_all(
        self,
        x: torch.Tensor,
        over: Groups,
        split_dim: int,
        concat_dim: int,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        """x."""
        return x

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, over: Groups
    ) -> torch.Tensor:
        """`add_rms_norm(x, residual, weight, eps)`."""
        return add_rms_norm(x, residual, weight, eps)

    def reduce_scatter_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        over: Groups,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        """`add_rms_norm(x, residual, weight, eps)`."""
        return add_rms_norm(x, residual, weight, eps)

    def exchange_counts(self, sent: torch.Tensor, over: Groups) -> tuple[Counts, Counts]:
        """What is sent, comes."""
        counts = sent.tolist()
        return counts, counts

    def dispatch(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """x."""
        return x

    def combine(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        """x."""
        return x

    def barrier(self) -> None:
        """Nobody to wait for."""


def gathering(collectives: Collectives, over: Groups) -> Callable[[torch.Tensor], torch.Tensor]:
    """`[...] -> [ranks, ...]`: what each rank of the group gives, in their order."""
    return lambda x: collectives.all_gather(x[None], over, 0)
