"""Random models of a few steps, whole and in parts, and ranks in numpy that carry out a compiled program.

Nothing here uses the engine's own execution: each instruction does what the words of its kind say.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quickturn.parallel.cost import Exchange, Hardware, Load
from quickturn.parallel.mesh import Groups, Mesh
from quickturn.parallel.ops import Op, Travel, Work
from quickturn.parallel.placement import Axis, Partial, Placed, Placement, Replicate, Residual, Shard
from quickturn.parallel.program import Dispatch, Fused, Layout, Move, Program, RunStep, Select

Array = npt.NDArray[np.float64]
Part = Callable[[Array, Array, int, int], Array]
"""(input, residual stream, which part, of how many) to output; an adding step changes the stream in place."""

HIDDEN, VOCAB, EXPERTS = 24, 11, 24


@dataclass(frozen=True)
class Node:
    """A step: what the compiler sees of it, and what it computes. `norm`: the weight of a norm. `chosen`: of
    a mixture's tokens, the weight of each expert, `[T, EXPERTS]`, 0 of those that a token doesn't take.
    """

    op: Op
    part: Part
    norm: Array | None = None
    chosen: Callable[[Array], Array] | None = None


def meshes(world: int, experts: bool = True) -> list[Mesh]:
    """Every mesh of so many ranks."""
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    return [
        Mesh(tp, dp, world // (tp * dp), dense_tp, moe_tp, world // moe_tp)
        for tp in sizes
        for dp in sizes
        if world % (tp * dp) == 0
        for dense_tp in sizes
        for moe_tp in (sizes if experts else [world])
    ]


def random_hardware(rng: np.random.Generator) -> Hardware:
    """Any rates: so that any program may be the cheapest one."""

    def size(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    exchanges = tuple((kind, Exchange(size(-7, -4), size(-8, -5), rng.uniform(0.1, 1))) for kind in kinds)
    return Hardware("random", size(7, 12), size(9, 14), size(-7, -4), size(6, 11), exchanges, size(-7, -4))


def restless(hardware: Hardware) -> Hardware:
    """The same, but all-to-all costs next to nothing, as kernels do: tokens like to travel."""
    others = tuple(pair for pair in hardware.exchanges if pair[0] != "all_to_all")
    exchanges = (*others, ("all_to_all", Exchange(0.0, 0.0, 1.0)))
    return replace(hardware, launch=0.0, host=0.0, exchanges=exchanges)


def any_hardware(rng: np.random.Generator) -> Hardware:
    """Of random rates, restless as often as not."""
    found = random_hardware(rng)
    return restless(found) if rng.integers(2) else found


def random_graph(rng: np.random.Generator, steps: int) -> tuple[list[Node], int]:
    """Steps behind an embedding, and the first that only sampled tokens need."""
    nodes = [_begin(rng)]
    last_mixer = 0
    while len(nodes) <= steps:
        found = _any(rng, nodes[-1].op.gives)
        nodes += found
        if found[-1].op.placed.mixes:
            last_mixer = len(nodes) - 1
    nodes = [_named(node, index) for index, node in enumerate(nodes)]
    return nodes, int(rng.integers(last_mixer, len(nodes))) + 1


def _any(rng: np.random.Generator, width: int) -> list[Node]:
    makers = [
        lambda: [_norm(rng, width, adds=False)],
        lambda: [_column(rng, _axis(rng), width, (int(rng.choice([24, 48])),))],
        lambda: [_row(rng, _axis(rng), width)],
        lambda: [_row(rng, _axis(rng), width)],
        lambda: [_activation(_axis(rng), width)],
        lambda: [_mixture(rng, width)],
        lambda: [_mixture(rng, width)],
        lambda: [_mixer("attn", width, joined=False)],
        lambda: [_column(rng, "attn", width, (24, 24)), _mixer("attn", 48, joined=True)],
    ]
    if width == HIDDEN:
        makers += [lambda: [_norm(rng, width, adds=True)]] * 4
    return makers[rng.integers(len(makers))]()


def dense(nodes: list[Node], tail: int, ids: Array, rows: npt.NDArray[np.int64]) -> Array:
    """What the model gives of one group's requests: `[rows, features]`."""
    x, stream = ids, ids
    for index, node in enumerate(nodes):
        if index == tail:
            x, stream = x[rows], stream[rows]
        x = node.part(x, stream, 0, 1)
        if node.op.placed.residual == "begin":
            stream = x.copy()
    return x[rows] if tail == len(nodes) else x


class NumpyRanks:
    """All ranks of a mesh, one instruction after the other. `own`: tokens of each group of requests."""

    def __init__(self, mesh: Mesh, nodes: list[Node], ids: list[Array], rows: list[npt.NDArray[np.int64]]):
        self.mesh, self.nodes, self.span = mesh, nodes, mesh.attention_span
        self.rows = rows
        self.own = [len(group) for group in ids]
        self.ids = ids
        self.x: list[Array] = [ids[rank // self.span] for rank in range(mesh.world)]
        self.stream = list(self.x)

    def run(self, program: Program) -> list[Array]:
        """What every rank ends with."""
        for instruction in program.instructions:
            match instruction:
                case RunStep(index, layout):
                    self._step(index)
                    self._check(self.x, layout, self.nodes[index].op.gives)
                case Move():
                    tensors = self.x if instruction.tensor == "x" else self.stream
                    tensors[:] = self._moved(tensors, instruction)
                    if instruction.tensor == "residual":
                        self._check(self.stream, instruction.after, HIDDEN)
                case Fused():
                    kind = (
                        "all_reduce" if instruction.kind == "all_reduce_add_norm" else "reduce_scatter_tokens"
                    )
                    move = Move(kind, "x", instruction.over, instruction.before, instruction.after)
                    self.x = self._moved(self.x, move)
                    self._step(instruction.step)
                    self._check(self.x, instruction.after, HIDDEN)
                case Dispatch(index, _, _, layout):
                    self.x = [self._dispatched(instruction, rank) for rank in range(self.mesh.world)]
                    self._check(self.x, layout, self.nodes[index].op.gives)
                case Select():
                    for rank in range(self.mesh.world):
                        rows = self.rows[rank // self.span]
                        self.x[rank], self.stream[rank] = self.x[rank][rows], self.stream[rank][rows]
                    self.own = [len(rows) for rows in self.rows]
        return self.x

    def _step(self, index: int) -> None:
        node = self.nodes[index]
        groups = self.mesh.features(node.op.placed.axis)
        for rank in range(self.mesh.world):
            x = self.x[rank]
            self.x[rank] = node.part(x, self.stream[rank], groups.index(rank), groups.size)
            if node.op.placed.residual == "begin":
                self.stream[rank] = self.x[rank]

    def _dispatched(self, instruction: Dispatch, rank: int) -> Array:
        """What other ranks make of the tokens of `rank` that want their experts, summed up."""
        node, x, mesh = self.nodes[instruction.step], self.x[rank], self.mesh
        assert node.chosen is not None
        assert len(x) == self._held(instruction.before.span, rank)
        wanted = np.split(node.chosen(x) > 0, mesh.ep, axis=1)
        total = np.zeros((len(x), node.op.gives))
        for place, member in enumerate(instruction.over.members(rank)):
            assert (member // mesh.moe_tp, member % mesh.moe_tp) == (place, rank % mesh.moe_tp)
            goes = wanted[place].any(axis=1)
            total[goes] += node.part(x[goes], x[goes], member, mesh.world)
        return total

    def _units(self, rank: int) -> int:
        """Rows of one rank, where its group has shared out its tokens, filled up."""
        return -(-self.own[rank // self.span] // self.span)

    def _held(self, span: int, rank: int) -> int:
        if span == self.span:
            return self.own[rank // self.span]
        return sum(self._units(other) for other in Groups(span).members(rank))

    def _check(self, tensors: list[Array], layout: Layout, features: int) -> None:
        for rank, tensor in enumerate(tensors):
            assert tensor.shape[0] == self._held(layout.span, rank)
            assert tensor.shape[1] == features // (layout.over if isinstance(layout.placement, Shard) else 1)
            if layout.placement == Replicate():
                np.testing.assert_allclose(tensor, tensors[rank // layout.span * layout.span], atol=1e-9)

    def _moved(self, tensors: list[Array], move: Move) -> list[Array]:
        if move.before.span == self.span != move.after.span:
            filled = [self._units(rank) * self.span for rank in range(self.mesh.world)]
            tensors = [
                np.concatenate((tensor, np.zeros((rows - len(tensor), tensor.shape[1]))))
                if rows > len(tensor)
                else tensor
                for tensor, rows in zip(tensors, filled, strict=True)
            ]
        moved = [self._of_group(move, rank, tensors) for rank in range(self.mesh.world)]
        if move.after.span == self.span != move.before.span:
            moved = [tensor[: self.own[rank // self.span]] for rank, tensor in enumerate(moved)]
        return moved

    def _of_group(self, move: Move, rank: int, tensors: list[Array]) -> Array:
        members, place = move.over.members(rank), move.over.index(rank)
        parts = [tensors[member] for member in members]
        after = move.after.span

        def tokens(whole: Array, mine: int = place) -> Array:
            """The rows of member `mine` of those of the whole group."""
            sizes = [sum(self._units(other) for other in Groups(after).members(member)) for member in members]
            assert sum(sizes) == len(whole)
            return whole[sum(sizes[:mine]) : sum(sizes[: mine + 1])]

        match move.kind:
            case "slice_tokens":
                return tokens(tensors[rank])
            case "slice_features":
                return np.split(tensors[rank], len(members), axis=1)[place]
            case "all_reduce":
                return np.sum(parts, axis=0)
            case "all_gather_tokens":
                return np.concatenate(parts)
            case "all_gather_features":
                return np.concatenate(parts, axis=1)
            case "reduce_scatter_tokens":
                return tokens(np.sum(parts, axis=0)).copy()
            case "reduce_scatter_features":
                return np.split(np.sum(parts, axis=0), len(members), axis=1)[place]
            case "all_to_all_to_tokens":
                return np.concatenate([tokens(part) for part in parts], axis=1)
            case "all_to_all_to_features":
                return np.concatenate([np.split(part, len(members), axis=1)[place] for part in parts])


def _named(node: Node, index: int) -> Node:
    name = f"{node.op.name}.{index}"
    return replace(node, op=replace(node.op, placed=replace(node.op.placed, name=name)))


def _axis(rng: np.random.Generator) -> Axis:
    axes: list[Axis] = ["attn", "dense", "vocab", "moe"]
    return axes[rng.integers(4)]


def _op(
    name: str, axis: Axis, ends: tuple[Placement, Placement], widths: tuple[int, int], joined: bool = False
) -> Op:
    kinds: dict[str, Residual] = {"begin": "begin", "add": "add_norm"}
    placed = Placed(name, axis, *ends, kinds.get(name, "none"), mixes=name == "mixer")
    work = Work(weights=2.0 * widths[0] * widths[1], operations=2.0 * widths[0] * widths[1])
    return Op(placed, *widths, work, joined=joined)


def _begin(rng: np.random.Generator) -> Node:
    table = rng.standard_normal((VOCAB, HIDDEN))

    def part(ids: Array, stream: Array, index: int, ranks: int) -> Array:
        return table[ids.astype(int)]

    return Node(_op("begin", "vocab", (Replicate(), Replicate()), (0, HIDDEN)), part)


def _norm(rng: np.random.Generator, width: int, adds: bool) -> Node:
    weight = rng.uniform(0.5, 2, width)

    def part(x: Array, stream: Array, index: int, ranks: int) -> Array:
        if adds:
            stream += x
            x = stream
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * weight

    ends = Replicate(), Replicate()
    return Node(_op("add" if adds else "norm", _axis(rng), ends, (width, width)), part, weight)


def _column(rng: np.random.Generator, axis: Axis, width: int, outputs: tuple[int, ...]) -> Node:
    segments = [rng.standard_normal((width, rows)) / width**0.5 for rows in outputs]

    def part(x: Array, stream: Array, index: int, ranks: int) -> Array:
        return x @ np.concatenate([np.split(segment, ranks, axis=1)[index] for segment in segments], axis=1)

    ends = Replicate(), Shard(-1)
    return Node(_op("column", axis, ends, (width, sum(outputs)), joined=len(outputs) > 1), part)


def _row(rng: np.random.Generator, axis: Axis, width: int) -> Node:
    weight = rng.standard_normal((width, HIDDEN)) / width**0.5

    def part(x: Array, stream: Array, index: int, ranks: int) -> Array:
        return x @ np.split(weight, ranks)[index]

    return Node(_op("row", axis, (Shard(-1), Partial()), (width, HIDDEN)), part)


def _activation(axis: Axis, width: int) -> Node:
    def part(x: Array, stream: Array, index: int, ranks: int) -> Array:
        return np.tanh(x)

    return Node(_op("activation", axis, (Shard(-1), Shard(-1)), (width, width)), part)


def _mixture(rng: np.random.Generator, width: int) -> Node:
    experts = rng.standard_normal((EXPERTS, width, HIDDEN)) / width**0.5
    router = rng.standard_normal((width, EXPERTS)) / width**0.5

    def chosen(x: Array) -> Array:
        # An expert begins to be taken with weight 0: rounding changes no result by much.
        return np.maximum(np.tanh(x @ router) - 0.8, 0)

    def part(x: Array, stream: Array, index: int, ranks: int) -> Array:
        mine = slice(index * EXPERTS // ranks, (index + 1) * EXPERTS // ranks)
        return np.einsum("te,tk,ekh->th", chosen(x)[:, mine], x, experts[mine])

    op = _op("mixture", "moe", (Replicate(), Partial()), (width, HIDDEN))
    travel = Travel(int(rng.integers(1, 9)), Work(weights=rng.uniform(0, 4) * width))
    # What travels comes back as wide as it went.
    return Node(replace(op, travel=travel if width == HIDDEN else None), part, chosen=chosen)


def _mixer(axis: Axis, width: int, joined: bool) -> Node:
    """A mean of the tokens so far; `joined`: of the product of two that lie side by side."""

    def part(x: Array, stream: Array, index: int, ranks: int) -> Array:
        if joined:
            first, second = np.split(x, 2, axis=1)
            x = np.tanh(first) * second
        return np.cumsum(x, axis=0) / np.arange(1, len(x) + 1)[:, None]

    ends = Shard(-1), Shard(-1)
    return Node(_op("mixer", axis, ends, (width, width // 2 if joined else width)), part)


def load_of(own: list[int]) -> Load:
    """What a step with so many tokens in each group is compiled for."""
    return Load(max(1, *own), 1, 1, 16)
