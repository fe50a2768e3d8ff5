"""Ways from one layout to another: what each collective does to a layout, and the cheapest one of them."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count

from quickturn.parallel.cost import COLLECTIVE_OF, Hardware, collective_seconds, kernel_seconds
from quickturn.parallel.mesh import Groups, Mesh
from quickturn.parallel.placement import Partial, Replicate, Shard
from quickturn.parallel.program import Layout, Move, MoveKind


@dataclass(frozen=True)
class Tensor:
    """What moves: features, bytes of each, and whether only its tokens can move (`joined` of an Op)."""

    features: int
    element: int = 2
    joined: bool = False


@dataclass(frozen=True)
class Path:
    """A sequence of moves and what it takes."""

    seconds: float
    moves: tuple[Move, ...]

    def of_stream(self) -> tuple[Move, ...]:
        """The same moves of the residual stream."""
        return tuple(replace(move, tensor="residual") for move in self.moves)


@cache
def spans(mesh: Mesh) -> tuple[int, ...]:
    """The spans that are worth a thought: those of the kinds of modules, single ranks, and the world."""
    found = {1, mesh.tp, mesh.attention_span, mesh.dense_tp, mesh.moe_tp, mesh.world}
    return tuple(sorted(found))


def placed(span: int, placement: Replicate | Shard | Partial, over: int) -> Layout:
    """The layout; parts or summands of one rank are whole."""
    return Layout(span) if over == 1 else Layout(span, placement, over)


def edges(layout: Layout, mesh: Mesh, tensor: Tensor) -> Iterator[tuple[MoveKind, Groups, Layout]]:
    """Every single move from `layout`: its kind, the ranks it runs over, and where the tensor lies then."""
    span, over, kind = layout.span, layout.over, layout.placement
    for other in spans(mesh):
        if other < span and span % other == 0 and other % over == 0:
            yield "slice_tokens", Groups(span // other, other), Layout(other, kind, over)
        if other > span and other % span == 0 and kind != Partial():
            yield "all_gather_tokens", Groups(other // span, span), Layout(other, kind, over)
    sharable = [size for size in spans(mesh) if size > 1 and tensor.features % size == 0]
    match kind:
        case Replicate():
            if tensor.joined:
                return
            for size in sharable:
                if span % size == 0:
                    yield "slice_features", Groups(size), Layout(span, Shard(-1), size)
                if span == 1:
                    yield "all_to_all_to_features", Groups(size), Layout(size, Shard(-1), size)
        case Shard():
            if tensor.joined:
                return
            yield "all_gather_features", Groups(over), Layout(span)
            if span == over and over in sharable:
                yield "all_to_all_to_tokens", Groups(over), Layout(1)
        case Partial():
            yield "all_reduce", Groups(over), Layout(span)
            if over in sharable and not tensor.joined:
                yield "reduce_scatter_features", Groups(over), Layout(span, Shard(-1), over)
            if span == over:
                for other in spans(mesh):
                    if other < over and over % other == 0:
                        yield (
                            "reduce_scatter_tokens",
                            Groups(over // other, other),
                            placed(other, Partial(), other),
                        )


@dataclass
class Ways:
    """The cheapest ways between layouts, in a step whose groups have `tokens` tokens each."""

    mesh: Mesh
    tokens: int
    hardware: Hardware
    _known: dict[tuple[Layout, Tensor], dict[Layout, Path]] = field(default_factory=dict)

    def rows(self, span: int) -> int:
        """Tokens that a rank has in this span, if all groups have the same number."""
        if span == self.mesh.attention_span:
            return self.tokens
        return -(-self.tokens // self.mesh.attention_span) * span

    def seconds(self, move: Move, tensor: Tensor) -> float:
        """What one move takes."""
        if move.kind == "slice_tokens":
            return 0.0
        size = self.moved_bytes(move, tensor)
        if move.kind == "slice_features":
            return kernel_seconds(2 * size, 0.0, self.hardware)
        return collective_seconds(COLLECTIVE_OF[move.kind], move.over.size, size, self.hardware)

    def moved_bytes(self, move: Move, tensor: Tensor) -> float:
        """Bytes of the tensor that a collective sees as a whole; of all-to-all, those of one rank."""
        at = move.after if move.kind == "all_gather_tokens" else move.before
        parts = at.over if at.placement == Shard(-1) else 1
        if move.kind == "all_gather_features":
            parts = 1
        if move.kind == "slice_features":
            parts = move.after.over
        return self.rows(at.span) * tensor.features * tensor.element / parts

    def of(self, source: Layout, tensor: Tensor) -> dict[Layout, Path]:
        """The cheapest path to every layout that can be reached; of equals the one with fewer moves."""
        key = source, tensor
        if key not in self._known:
            self._known[key] = self._search(source, tensor)
        return self._known[key]

    def _search(self, source: Layout, tensor: Tensor) -> dict[Layout, Path]:
        order = count()
        found: dict[Layout, Path] = {}
        heap = [(0.0, 0, next(order), source, Path(0.0, ()))]
        while heap:
            seconds, steps, _, layout, path = heapq.heappop(heap)
            if layout in found:
                continue
            found[layout] = path
            for kind, over, after in edges(layout, self.mesh, tensor):
                if after not in found:
                    move = Move(kind, "x", over, layout, after)
                    total = seconds + self.seconds(move, tensor)
                    longer = Path(total, (*path.moves, move))
                    heapq.heappush(heap, (total, steps + 1, next(order), after, longer))
        return found
