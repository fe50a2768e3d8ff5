"""Parameters as models declare them: which checkpoint tensors they are made of, and how they are shared out
on the mesh.
"""

from dataclasses import dataclass
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
class Segment:
    """The rows of a parameter that one checkpoint tensor gives. Each segment is sharded by itself, in whole
    units.

    `unit` is the number of rows that stay together: the dims of a head. `cut`: which part of the tensor,
    None for all of it, in the shape that the parameter has.
    """

    tensor: str
    rows: int
    unit: int = 1
    cut: Cut | None = None


@dataclass(frozen=True)
class WeightSpec:
    """One parameter: its segments one below the other, `[rows, columns]`, or `[rows]` if `columns` is None.

    `use` says how it will be read: `linear` is laid out as the kernels like it, `experts` (a stack of
    matrices), `table` and `vector` stay as they are. `placement` is how it lies on `axis`:
    Shard(0) and Shard(1) in equal parts of rows (of each segment) or columns, Partial whole on the first
    rank and zero on the others (a bias added to summands).

    `alternatives`: other segments that give the same rows, for checkpoints that store them in another way.
    `stack`: the rows belong to so many matrices, one below the other (0: it is one). `wide`: float32 whatever
    the model's dtype. `offset` is added to every element (norms that store their weight less one).
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
    return (segment.rows,) if spec.columns is None else (segment.rows, spec.columns)
