"""Parameters as models declare them: which checkpoint tensors they are made of, and how they are shared out
on the mesh.
"""

from dataclasses import dataclass
from typing import Literal

from quickturn.parallel.placement import Axis, Placement


@dataclass(frozen=True)
class Segment:
    """The rows of a parameter that one checkpoint tensor gives. Each segment is sharded by itself, in whole
    units.

    `unit` is the number of rows that stay together: the dims of a head.
    """

    tensor: str
    rows: int
    unit: int = 1


@dataclass(frozen=True)
class WeightSpec:
    """One parameter: its segments one below the other, `[rows, columns]`, or `[rows]` if `columns` is None.

    `use` says how it will be read: `linear` is laid out as the kernels like it, `table` and `vector` stay as
    they are. `placement` is how it lies on `axis`: Shard(0) and Shard(1) in equal parts of rows or columns,
    Partial whole on the first rank and zero on the others (a bias added to summands).
    """

    name: str
    segments: tuple[Segment, ...]
    columns: int | None
    use: Literal["linear", "table", "vector"]
    axis: Axis
    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        rows = sum(segment.rows for segment in self.segments)
        return (rows,) if self.columns is None else (rows, self.columns)
