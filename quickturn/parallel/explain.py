"""A compiled program for people: each kind of layer once, each step and each move with its bytes and time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quickturn.parallel.compile import fused_seconds, step_seconds
from quickturn.parallel.cost import COLLECTIVE_OF, H200, Hardware, Load, wire_bytes
from quickturn.parallel.moves import Tensor, Ways
from quickturn.parallel.ops import Op
from quickturn.parallel.placement import Axis
from quickturn.parallel.program import Dispatch, Fused, Instruction, Move, Program, RunStep, Select

LABELS = {
    "slice_tokens": "keep own tokens",
    "slice_features": "keep own features",
    "all_reduce": "all-reduce",
    "all_gather_tokens": "all-gather tokens",
    "all_gather_features": "all-gather features",
    "reduce_scatter_tokens": "reduce-scatter tokens",
    "reduce_scatter_features": "reduce-scatter features",
    "all_to_all_to_tokens": "all-to-all to tokens",
    "all_to_all_to_features": "all-to-all to features",
    "all_reduce_add_norm": "all-reduce + add + norm",
    "reduce_scatter_add_norm": "reduce-scatter + add + norm",
}


@dataclass(frozen=True)
class Line:
    """One instruction. `what`: the collective, if it is one; `step`: the step, if it runs one; `ranks` that
    talk to each other. `lies`: where its output lies, `stream`: the ranks that share the residual stream's
    tokens then, 0 before there is one. `sent`: bytes that each rank sends for each token of its group; bytes
    of weights and cache that a rank reads, and held of weights. `between`: of a step's seconds, those between
    ranks.
    """

    kind: Literal["step", "move", "local", "fused", "dispatch", "select"]
    what: str
    step: str
    axis: Axis | None
    ranks: int
    lies: str
    stream: int
    adds: bool
    sent: float = 0.0
    weights: float = 0.0
    held: float = 0.0
    cache: float = 0.0
    seconds: float = 0.0
    between: float = 0.0


@dataclass(frozen=True)
class Section:
    """Instructions that occur as often as `layers` says (none of them: outside the layers)."""

    layers: tuple[int, ...]
    lines: tuple[Line, ...]

    @property
    def times(self) -> int:
        """How often they run."""
        return max(1, len(self.layers))

    @property
    def seconds(self) -> float:
        """What they take, once."""
        return sum(line.seconds for line in self.lines)


@dataclass(frozen=True)
class Explained:
    """A program, what it is for, and its sections in order of their first layers."""

    program: Program
    load: Load
    hardware: Hardware
    sections: tuple[Section, ...]

    def total(self, what: Literal["sent", "weights", "held", "cache", "seconds"]) -> float:
        """Of a whole step."""
        found = 0.0
        for section in self.sections:
            found += section.times * sum(float(getattr(line, what)) for line in section.lines)
        return found

    def axes(self) -> frozenset[Axis]:
        """The kinds of modules that there are."""
        lines = (line for section in self.sections for line in section.lines)
        return frozenset(line.axis for line in lines if line.axis is not None)

    @property
    def between(self) -> float:
        """Seconds of a step in instructions that talk to other ranks."""
        talking = ("move", "fused")
        return sum(
            section.times * (line.seconds if line.kind in talking else line.between)
            for section in self.sections
            for line in section.lines
        )


def explain(
    ops: Sequence[Op],
    tail: int,
    starts: Sequence[int],
    program: Program,
    load: Load,
    hardware: Hardware = H200,
) -> Explained:
    """What `program` does, compiled of `ops` for `load`. `starts`: the first step of each layer, and the
    first behind the last.
    """
    layers: dict[int, list[Line]] = {}
    for at, line in _lines(ops, tail, program, load, hardware):
        layers.setdefault(sum(start <= at for start in starts) - 1, []).append(line)
    alike: dict[tuple[Line, ...], list[int]] = {}
    last = len(starts) - 1
    for layer, lines in layers.items():
        if 0 <= layer < last:
            alike.setdefault(tuple(lines), []).append(layer)
    sections = [Section(tuple(found), lines) for lines, found in alike.items()]
    before, behind = (Section((), tuple(layers[layer])) for layer in (-1, last))
    return Explained(program, load, hardware, (before, *sections, behind))


def _lines(
    ops: Sequence[Op], tail: int, program: Program, load: Load, hardware: Hardware
) -> Iterator[tuple[int, Line]]:
    """Each instruction, and the step that it belongs to: itself, or the one that it moves data for."""
    ways = Ways(program.mesh, load.tokens, hardware)
    hidden = Tensor(next(op.gives for op in ops if op.placed.residual == "begin"))
    done, stream = -1, 0
    for instruction in program.instructions:
        before = Tensor(ops[done].gives, ops[done].gives_element) if done >= 0 else Tensor(0)
        match instruction:
            case RunStep(step, layout):
                done, op = step, ops[step]
                if op.placed.residual == "begin":
                    stream = layout.span
                seconds = step_seconds(op, layout, ways, load)
                yield step, _of_step(instruction, op, stream, ways, load, seconds)
            case Fused(kind, step):
                done, op = step, ops[step]
                stream = instruction.after.span
                move = _unfused(instruction)
                line = _of_step(instruction, op, stream, ways, load, fused_seconds(op, move, ways, load))
                sent = _sent(move, Tensor(op.takes, op.element), ways, load)
                yield (
                    step,
                    replace(line, kind="fused", what=LABELS[kind], ranks=instruction.over.size, sent=sent),
                )
            case Dispatch(step):
                done, op = step, ops[step]
                yield step, _of_dispatch(instruction, op, stream, ways, load)
            case Move():
                tensor = hidden if instruction.tensor == "residual" else before
                stream = instruction.after.span if instruction.tensor == "residual" else stream
                yield done + 1, _of_move(instruction, tensor, stream, ways, load)
            case Select():
                ways = Ways(program.mesh, load.samples, hardware)
                load = replace(load, tokens=load.samples)
                yield done + 1, Line("select", "only sampled tokens go on", "", None, 0, "", stream, False)


def _of_step(
    instruction: RunStep | Fused, op: Op, stream: int, ways: Ways, load: Load, seconds: float
) -> Line:
    layout = instruction.layout if isinstance(instruction, RunStep) else instruction.after
    rows, work = ways.rows(layout.span), op.work
    merge = work.merge
    merged = wire_bytes("all_gather", merge.ranks, merge.size(load), ways.hardware) if merge else 0.0
    return Line(
        kind="step",
        what="",
        step=op.like or op.name,
        axis=op.placed.axis,
        ranks=merge.ranks if merge else 0,
        lies=str(layout),
        stream=stream,
        adds=op.placed.residual == "add_norm",
        sent=merged / max(1, load.tokens),
        weights=work.weight_bytes(rows),
        held=work.held_bytes(),
        cache=work.cache.size(load),
        seconds=seconds,
    )


def _of_dispatch(instruction: Dispatch, op: Op, stream: int, ways: Ways, load: Load) -> Line:
    rows, ranks, hardware = ways.rows(instruction.before.span), instruction.over.size, ways.hardware
    here, between = op.travel_seconds(rows, ranks, load, hardware)
    assert op.travel is not None
    sent = sum(wire_bytes("all_to_all", ranks, size, hardware) for size in op.messages(rows, ranks, load))
    return Line(
        kind="dispatch",
        what="dispatch + combine",
        step=op.like or op.name,
        axis=op.placed.axis,
        ranks=ranks,
        lies=str(instruction.after),
        stream=stream,
        adds=False,
        sent=sent / max(1, load.tokens),
        weights=op.travel_weights(rows, ranks),
        held=op.work.held_bytes() + op.travel.kept,
        seconds=here + between,
        between=between,
    )


def _of_move(move: Move, tensor: Tensor, stream: int, ways: Ways, load: Load) -> Line:
    local = move.kind.startswith("slice")
    whose = " of the residual" if move.tensor == "residual" else ""
    return Line(
        kind="local" if local else "move",
        what=LABELS[move.kind] + whose,
        step="",
        axis=None,
        ranks=0 if local else move.over.size,
        lies=str(move.after),
        stream=stream,
        adds=False,
        sent=0.0 if local else _sent(move, tensor, ways, load),
        seconds=ways.seconds(move, tensor),
    )


def _sent(move: Move, tensor: Tensor, ways: Ways, load: Load) -> float:
    size = ways.moved_bytes(move, tensor)
    return wire_bytes(COLLECTIVE_OF[move.kind], move.over.size, size, ways.hardware) / max(1, load.tokens)


def _unfused(fused: Instruction) -> Move:
    assert isinstance(fused, Fused)
    kind: Literal["all_reduce", "reduce_scatter_tokens"] = (
        "all_reduce" if fused.kind == "all_reduce_add_norm" else "reduce_scatter_tokens"
    )
    return Move(kind, "x", fused.over, fused.before, fused.after)
