"""What one rank holds of the declared weights."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quickturn.parallel.mesh import Mesh
from quickturn.parallel.placement import Axis, Partial, PlacementError, Replicate, Shard
from quickturn.parallel.weights import Segment, Share, WeightSpec


@dataclass(frozen=True)
class Place:
    """A rank of a mesh."""

    mesh: Mesh
    rank: int

    def part(self, axis: Axis) -> tuple[int, int]:
        """(Which part, of how many) of the features of such steps."""
        ranks = self.mesh.features(axis)
        return ranks.index(self.rank), ranks.size

    def experts(self) -> tuple[int, int]:
        """(Which part, of how many) of the experts."""
        return self.mesh.axis("ep").index(self.rank), self.mesh.ep

    def expert_features(self) -> tuple[int, int]:
        """(Which part, of how many) of the features of an expert."""
        return self.mesh.axis("moe_tp").index(self.rank), self.mesh.moe_tp

    def tokens(self) -> tuple[int, int]:
        """(Which part, of how many) of the tokens in a block of the cache."""
        return self.mesh.axis("cp").index(self.rank), self.mesh.cp


def local_weights(specs: Iterable[WeightSpec], place: Place) -> list[WeightSpec]:
    """What the rank at `place` holds of `specs`, whose alternatives were chosen. Raises PlacementError for a
    weight that can't be shared out so.
    """
    return [local_weight(spec, place) for spec in specs]


def local_weight(spec: WeightSpec, place: Place) -> WeightSpec:
    """What the rank at `place` holds of one weight. Raises PlacementError if it can't be shared out so.

    A table of a vocabulary that the ranks don't divide is padded with zeros to equal shares.
    """
    if spec.stack:
        spec = _own_experts(spec, *place.experts())
        index, ranks = place.expert_features()
    else:
        index, ranks = place.part(spec.axis)
    if ranks == 1 or spec.placement == Replicate():
        return spec
    if spec.placement == Partial():
        return spec if index == 0 else replace(spec, zero=True)
    if spec.placement == Shard(0):
        padded = spec.axis == "vocab"
        return replace(
            spec, segments=tuple(_rows(spec, segment, index, ranks, padded) for segment in spec.segments)
        )
    assert spec.placement == Shard(1)
    assert spec.columns is not None
    if spec.columns % ranks:
        raise PlacementError(
            f"{spec.name} has {spec.columns} input features, which {ranks} ranks can't share"
        )
    width = spec.columns // ranks
    taken = (index * width, (index + 1) * width)
    segments = (
        replace(segment, share=Share((segment.rows, spec.columns), (0, segment.rows), taken))
        for segment in spec.segments
    )
    return replace(spec, segments=tuple(segments), columns=width)


def _own_experts(spec: WeightSpec, index: int, ranks: int) -> WeightSpec:
    if spec.stack % ranks:
        raise PlacementError(f"{spec.name} is of {spec.stack} experts, which {ranks} ranks can't share")
    each = len(spec.segments) // ranks
    return replace(spec, segments=spec.segments[index * each : (index + 1) * each], stack=spec.stack // ranks)


def _rows(spec: WeightSpec, segment: Segment, index: int, ranks: int, padded: bool) -> Segment:
    units = segment.rows // segment.unit
    if units % ranks == 0:
        first, count = index * units // ranks, units // ranks
    elif segment.repeats and ranks % units == 0:
        first, count = index * units // ranks, 1
    elif padded:
        count = -(-units // ranks)
        first = min(index * count, units)
    else:
        raise PlacementError(
            f"{segment.tensor} has {units} parts that stay whole ({spec.axis} features of {segment.unit}"
            f" rows), which {ranks} ranks can't share"
        )
    start, stop = first * segment.unit, min(first + count, units) * segment.unit
    columns = None if spec.columns is None else (0, spec.columns)
    whole = (segment.rows,) if spec.columns is None else (segment.rows, spec.columns)
    return replace(segment, rows=count * segment.unit, share=Share(whole, (start, stop), columns))
