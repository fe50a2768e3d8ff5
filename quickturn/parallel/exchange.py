"""Tokens that travel to the ranks of their experts, and what is made of them there, which travels back.

A token goes once to each rank that has one of its experts, with the numbers and weights of those; that rank
sums up what they make of it; where the token is, the ranks' sums are added up in their order. Two ways to
know how many rows go where:

- by counting: the ranks tell each other first, and the host waits for it;
- by the worst case: every token has a row for every rank, and where none of its experts is, that row asks for
  expert -1, which is none. Nothing is read back, so that a CUDA graph can record it.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from quickturn.parallel.collectives import Collectives, Counts
from quickturn.parallel.mesh import Groups


@runtime_checkable
class Mixing(Protocol):
    """A mixture of experts in its parts. Every rank has `here` experts, in the order of the ranks."""

    @property
    def here(self) -> int:
        """Experts on this rank."""

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each token float32 weights and int32 numbers of its experts, `[T, k]`, among all; -1: none."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The weighted sum of what experts make of each row; `chosen` numbers those here."""

    def beside(self, x: torch.Tensor) -> torch.Tensor | None:
        """What every token gets besides, float32; None if nothing."""


def exchanged(
    x: torch.Tensor, mixing: Mixing, over: Groups, collectives: Collectives, held: Sequence[int]
) -> torch.Tensor:
    """The mixture of this rank's tokens `[T, H]`. `held`: tokens of each rank of the group."""
    sent: Counts
    came: Counts
    weights, chosen = mixing.choose(x)
    owners = torch.div(chosen, mixing.here, rounding_mode="floor")
    ranks = torch.arange(over.size, device=x.device)
    if recorded(x):
        to = ranks.repeat_interleave(x.shape[0])
        tokens = torch.arange(x.shape[0], device=x.device).repeat(over.size)
        sent, came = [x.shape[0]] * over.size, held
    else:
        goes = (owners == ranks[:, None, None]).any(2)
        to, tokens = goes.nonzero().unbind(1)
        sent, came = collectives.exchange_counts(goes.sum(1), over)
    there = owners[tokens] == to[:, None]
    asked = torch.where(there, chosen[tokens] - to[:, None] * mixing.here, -1).to(torch.int32)
    message = _packed(x[tokens], weights[tokens], asked)
    got = collectives.dispatch(message, over, sent, came)
    rows, shares, experts = _unpacked(got, x, weights)
    made = mixing.mix(rows, shares, experts) if rows.shape[0] else rows
    back = collectives.combine(made, over, sent, came)
    total = mixing.beside(x)
    if total is None:
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    # A token is once among a rank's rows, and ranks come in order: the same sums every time.
    parts = zip(back.split_with_sizes(list(sent)), tokens.split_with_sizes(list(sent)), strict=True)
    for part, at in parts:
        total.index_add_(0, at, part.float())
    return total.to(x.dtype)


def recorded(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being made, for which nothing may be read back."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _packed(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Rows of bytes: one message for all three."""
    # A tensor of no rows may have any strides, and passes for contiguous.
    parts = (part.contiguous() if len(part) else part.new_empty(part.shape) for part in (x, weights, chosen))
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def _unpacked(
    message: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What was packed, in the dtypes and widths of `x` and `weights`."""
    each = x.shape[1] * x.element_size(), *(4 * weights.shape[1],) * 2
    rows, shares, chosen = (
        part.clone(memory_format=torch.contiguous_format) for part in message.split_with_sizes(each, 1)
    )
    return rows.view(x.dtype), shares.view(torch.float32), chosen.view(torch.int32)
