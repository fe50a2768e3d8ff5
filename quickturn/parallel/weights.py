"""Parameters as models declare them: which checkpoint tensors they are made of, and how they are shared out
on the mesh.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from quickturn.parallel.placement import Axis, Placement

MXFP4 = ".mxfp4"
"""Ending of a tensor that a checkpoint keeps in MXFP4, as two tensors `_blocks` and `_scales`; loaders see it
as one, `[..., columns]` in floats."""


@dataclass(frozen=True)
class Cut:
    """The part of a checkpoint tensor that a segment is made of.

    `shape` is the tensor's own, `view` how its elements are seen, `at` the (start, stop, step) taken of each
    dimension of that; with `swapped` the last two dimensions change places. What comes out, row-major, are
    the rows of the segment.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    at: tuple[tuple[int, int, int], ...]
    swapped: bool = False


@dataclass(frozen=True)
class Share:
    """A rank's part of what a segment gives: of its shape `whole`, these rows and columns (start, stop)."""

    whole: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int] | None


@dataclass(frozen=True)
class Segment:
    """The rows of a parameter that one checkpoint tensor gives. Each segment is sharded by itself, in whole
    units.

    `unit` is the number of rows that stay together: the dims of a head. `repeats`: several ranks hold the
    same unit where there are fewer units than ranks (heads of keys and values). `cut`: which part of the
    tensor, None for all of it, in the shape that the parameter has. `share`: which part of that, None for
    all; of `rows` rows those behind its own are zeros.
    """

    tensor: str
    rows: int
    unit: int = 1
    cut: Cut | None = None
    repeats: bool = False
    share: Share | None = None

    @property
    def taken(self) -> Cut | None:
        """The part of the tensor that is read: `share` of `cut`; None for all of it."""
        return self.cut if self.share is None else narrowed(self.cut, self.share)

    @property
    def rows_read(self) -> int:
        """Rows that the tensor gives."""
        return self.rows if self.share is None else self.share.rows[1] - self.share.rows[0]


@dataclass(frozen=True)
class WeightSpec:
    """One parameter: its segments one below the other, `[rows, columns]`, or `[rows]` if `columns` is None.

    `use` says how it will be read: `linear` is laid out as the kernels like it, `experts` (a stack of
    matrices), `table` and `vector` stay as they are. `placement` is how it lies on `axis`:
    Shard(0) and Shard(1) in equal parts of rows (of each segment) or columns, Partial whole on the first
    rank and zero on the others (a bias added to summands).

    `alternatives`: other segments that give the same rows, for checkpoints that store them in another way.
    `stack`: the rows belong to so many matrices, one below the other (0: it is one). `wide`: float32 whatever
    the model's dtype. `offset` is added to every element (norms that store their weight less one). `zero`:
    nothing is read, it is zeros here.
    """

    name: str
    segments: tuple[Segment, ...]
    columns: int | None
    use: Literal["linear", "table", "vector", "experts"]
    axis: Axis
    placement: Placement
    alternatives: tuple[tuple[Segment, ...], ...] = ()
    stack: int = 0
    wide: bool = False
    offset: float = 0.0
    zero: bool = False

    @property
    def rows(self) -> int:
        """Rows of the whole parameter."""
        return sum(segment.rows for segment in self.segments)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        rows = (self.stack, self.rows // self.stack) if self.stack else (self.rows,)
        return rows if self.columns is None else (*rows, self.columns)


def stored_shape(spec: WeightSpec, segment: Segment) -> tuple[int, ...]:
    """Shape of the checkpoint tensor that `segment` of `spec` is taken from."""
    if segment.cut is not None:
        return segment.cut.shape
    if segment.share is not None:
        return segment.share.whole
    return (segment.rows,) if spec.columns is None else (segment.rows, spec.columns)


def narrowed(cut: Cut | None, share: Share) -> Cut:
    """`share` of the rows and columns that `cut` gives. Raises ValueError for rows that no cut can give: they
    begin or end within what one index of a dimension of `cut` holds.
    """
    if cut is None:
        columns = () if share.columns is None else ((*share.columns, 1),)
        return Cut(share.whole, share.whole, ((*share.rows, 1), *columns))
    at = list(cut.at)
    order = list(range(len(at)))
    if cut.swapped:
        order[-2:] = order[-1], order[-2]
    if share.columns is not None:
        last = order.pop()
        at[last] = _within(at[last], share.columns)
    lengths = [len(range(*at[dim])) for dim in order]
    first = next((place for place, length in enumerate(lengths) if length > 1), len(lengths) - 1)
    inner = math.prod(lengths[first + 1 :])
    start, stop = share.rows
    if start % inner or stop % inner:
        raise ValueError(f"rows {start} to {stop} of {cut} are not whole: {inner} belong together")
    at[order[first]] = _within(at[order[first]], (start // inner, stop // inner))
    return replace(cut, at=tuple(at))


def _within(of: tuple[int, int, int], part: tuple[int, int]) -> tuple[int, int, int]:
    start, _, step = of
    first, last = part
    return start + first * step, start + (last - 1) * step + 1 if last > first else start + first * step, step
