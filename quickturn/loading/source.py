"""What a loader must be able to do, whatever the file format."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch

from quickturn.parallel.weights import Cut


class TensorSource(Protocol):
    """Named tensors, under the names that Hugging Face checkpoints use."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """The quantised format of `quickturn_kernels` that holds exactly the numbers of tensor `name`; None
        if there is none."""

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """Write tensor `name`, or that part of it, to `out`, casting to the dtype and moving to the device of
        `out`.

        `out` has the tensor's shape, or as many elements as the part. May be called by several threads at
        once.
        """


def take(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The part of `tensor`, of any shape with `cut.shape`'s elements, that `cut` means; a view where it can
    be."""
    part = tensor.reshape(cut.view)[tuple(slice(*at) for at in cut.at)]
    return part.transpose(-1, -2) if cut.swapped else part


def box(cut: Cut, align: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], Cut]:
    """The smallest box (start, stop) of a tensor's dimensions that holds what `cut` takes, and the cut of
    that box. Its sides are multiples of `align`, or where the tensor ends.
    """
    if len(cut.view) > len(cut.shape) and len(range(*cut.at[0])) == 1:
        # Of one group of rows: plain rows.
        (group, _, _), (start, stop, step), *others = cut.at
        before = group * cut.view[1]
        rows = (before + start, before + stop, step)
        cut = replace(cut, view=cut.shape, at=(rows, *others))
    grouped = len(cut.view) - len(cut.shape)
    at, group = cut.at, 1
    if grouped:
        # Rows in groups: whole groups are taken, as many as the alignment wants.
        group = math.prod(cut.view[1 : grouped + 1])
        at = (cut.at[0], *cut.at[grouped + 1 :])
    sides, inner, view = [], [], []
    for dim, ((start, stop, step), size, unit) in enumerate(zip(at, cut.shape, align, strict=True)):
        scale = group if dim == 0 else 1
        unit = math.lcm(unit, scale)
        low = start * scale // unit * unit
        high = min(size, -(-stop * scale // unit) * unit)
        sides.append((low, high))
        inner.append((start - low // scale, stop - low // scale, step))
        view.append((high - low) // scale)
    box_shape = tuple(high - low for low, high in sides)
    middle = cut.view[1 : grouped + 1]
    return tuple(sides), Cut(
        box_shape,
        (view[0], *middle, *view[1:]),
        (inner[0], *cut.at[1 : grouped + 1], *inner[1:]),
        cut.swapped,
    )


class RenamedSource:
    """A source with other prefixes, and without the tensors that the model has no use for."""

    def __init__(
        self, source: TensorSource, prefixes: Sequence[tuple[str, str]], ignored: Sequence[str]
    ) -> None:
        """`prefixes`: (in the checkpoint, here), the first that fits; `ignored`: prefixes in the
        checkpoint.
        """
        self._source = source
        self._stored: dict[str, str] = {}
        for name in source.shapes():
            if not name.startswith(tuple(ignored)):
                self._stored[_renamed(name, prefixes)] = name
        shapes = source.shapes()
        self._shapes = {here: shapes[name] for here, name in self._stored.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor that is left."""
        return self._shapes

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """As the source says."""
        return self._source.stored_bits(self._stored[name])

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """As the source does."""
        self._source.read_into(self._stored[name], out, cut)


def _renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    for there, here in prefixes:
        if name.startswith(there):
            return here + name.removeprefix(there)
    return name
