"""The parallel compiler: which layout every step of a model runs in on a mesh, and what moves in between.

A shortest path. A state, behind each step, is where the activations lie and where the residual stream lies;
every step may run in any layout that its weights allow (a norm, say, on shared-out tokens); between two steps
the activations take the cheapest way there is, and so does the stream, ahead of a step that adds to it. What
a state costs is the sum of what steps and moves are expected to take, so the program found is the cheapest
of all, under that model (Bellman 1958).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quickturn.parallel.cost import FUSIONS, H200, Hardware, Load
from quickturn.parallel.mesh import Groups, Mesh
from quickturn.parallel.moves import Path, Tensor, Ways, edges, placed, spans
from quickturn.parallel.ops import Op
from quickturn.parallel.placement import Partial, Placement, PlacementError, Replicate, Shard
from quickturn.parallel.program import (
    Dispatch,
    Fused,
    Instruction,
    Layout,
    Move,
    Program,
    Programs,
    RunStep,
    Select,
)

SIZES = (16, 64, 256, 1024, 4096, 16384)
"""Tokens in a group of requests that programs are made for."""


@dataclass(frozen=True)
class Form:
    """One way to run a step: where its input must lie, where its output will, what it takes, and the move
    ahead of it that is part of it, if one is; `travel`: the ranks over which its tokens go to their experts
    and back, if they do.
    """

    before: Layout
    after: Layout
    seconds: float
    fused: Move | None = None
    travel: Groups | None = None

    def instruction(self, step: int) -> Instruction:
        """The step, run so."""
        if self.travel is not None:
            return Dispatch(step, self.travel, self.before, self.after)
        if self.fused is None:
            return RunStep(step, self.after)
        return Fused(FUSIONS[self.fused.kind].kind, step, self.fused.over, self.before, self.after)


State = tuple[Layout, int]
"""Layout of the activations, and span of the residual stream (0: there is none yet)."""


@dataclass(frozen=True)
class _Reached:
    """How a state was reached for the least: seconds, instructions so far, state before, what was added."""

    seconds: float
    length: int
    before: State | None
    added: tuple[Instruction, ...]


def compile_programs(ops: Sequence[Op], tail: int, mesh: Mesh, hardware: Hardware = H200) -> Programs:
    """Programs for all sizes of steps; sizes that have the same one share it.

    Raises PlacementError as `compile_program` does.
    """
    found: list[Program] = []
    for tokens in SIZES if mesh.world > 1 else SIZES[-1:]:
        load = Load(tokens, min(tokens, 256), min(tokens, 256), 8192)
        program = compile_program(ops, tail, mesh, load, hardware)
        if found and found[-1].instructions == program.instructions:
            found[-1] = program
        else:
            found.append(program)
    return Programs(tuple(found))


def compile_program(
    ops: Sequence[Op], tail: int, mesh: Mesh, load: Load, hardware: Hardware = H200
) -> Program:
    """The cheapest program for steps of such a load. `tail`: the first step that only sampled tokens need.

    Raises PlacementError naming the two steps between which nothing leads from what one gives to what the
    other takes.
    """
    home = Layout(mesh.attention_span)
    hidden = Tensor(next((op.gives for op in ops if op.placed.residual == "begin"), 0))
    every = Ways(mesh, load.tokens, hardware)
    sampled = Ways(mesh, load.samples, hardware)
    tail_load = replace(load, tokens=load.samples)
    known: dict[tuple[Op, bool], list[Form]] = {}
    layers = [{(home, 0): _Reached(0.0, 0, None, ())}]
    for index, op in enumerate(ops):
        ways = every if index < tail else sampled
        if index == tail:
            layers.append(_select(layers[-1], _output(ops[index - 1]), hidden, every))
        kind = op.kind, index < tail
        if kind not in known:
            known[kind] = _forms(op, ways, load if index < tail else tail_load)
        forms = [(form, form.instruction(index)) for form in known[kind]]
        layers.append(_step(layers[-1], ops[index - 1] if index else None, op, forms, ways))
    last = _output(ops[-1])
    ways = every if tail >= len(ops) else sampled
    ends: dict[State, _Reached] = {}
    for (layout, stream), reached in layers[-1].items():
        path = ways.of(layout, last).get(home)
        if path is not None:
            _keep(ends, (home, stream), (layout, stream), reached, path.seconds, path.moves)
    if not ends:
        raise PlacementError(f"step '{ops[-1].name}' is the last, but nothing makes its output whole")
    end = min(ends, key=lambda state: (ends[state].seconds, ends[state].length, state[1]))
    return Program(mesh, load.tokens, _walk_back([*layers, ends], end), ends[end].seconds)


def _select(states: dict[State, _Reached], x: Tensor, stream: Tensor, ways: Ways) -> dict[State, _Reached]:
    """Only sampled tokens go on: activations and stream come to attention's span, where they are selected."""
    found: dict[State, _Reached] = {}
    home = ways.mesh.attention_span
    for (layout, span), reached in states.items():
        carried = ways.of(Layout(span), stream)[Layout(home)] if span else Path(0.0, ())
        for then, path in ways.of(layout, x).items():
            if then.span == home:
                added: tuple[Instruction, ...] = (*path.moves, *carried.of_stream(), Select())
                seconds = path.seconds + carried.seconds
                _keep(found, (then, home if span else 0), (layout, span), reached, seconds, added)
    return found


def _step(
    states: dict[State, _Reached],
    before: Op | None,
    op: Op,
    forms: Sequence[tuple[Form, Instruction]],
    ways: Ways,
) -> dict[State, _Reached]:
    """The states behind a step. Raises PlacementError if there are none."""
    adds, begins = op.placed.residual == "add_norm", op.placed.residual == "begin"
    tensor = Tensor(op.takes) if before is None else _output(before)
    _check(before, op, any(stream for _, stream in states))
    found: dict[State, _Reached] = {}
    for (layout, stream), reached in states.items():
        paths = ways.of(layout, tensor)
        for form, instruction in forms:
            path = paths.get(form.before)
            if path is None:
                continue
            seconds, then = path.seconds + form.seconds, stream
            added: tuple[Instruction, ...] = (*path.moves, instruction)
            if begins:
                then = form.after.span
            if adds and stream != form.after.span:
                carried = ways.of(Layout(stream), Tensor(op.takes, op.element)).get(Layout(form.after.span))
                if carried is None:
                    continue
                seconds, then = seconds + carried.seconds, form.after.span
                added = (*carried.of_stream(), *added)
            _keep(found, (form.after, then), (layout, stream), reached, seconds, added)
    if not found:
        what, given = ("input", Replicate()) if before is None else (before.name, before.placed.produces)
        raise PlacementError(
            f"step '{what}' is followed by step '{op.name}', but nothing converts {given} on"
            f" {_axis(before or op, ways.mesh)} to {op.placed.consumes} on {_axis(op, ways.mesh)}"
        )
    return found


def _output(op: Op) -> Tensor:
    return Tensor(op.gives, op.gives_element, op.joined)


def _check(before: Op | None, op: Op, stream: bool) -> None:
    if before is None:
        return
    if before.gives != op.takes:
        raise PlacementError(
            f"step '{before.name}' gives {before.gives} features, but step '{op.name}' behind it takes"
            f" {op.takes}"
        )
    if op.placed.residual == "add_norm":
        if not stream:
            raise PlacementError(
                f"step '{op.name}' adds what step '{before.name}' gives to the residual stream, which no step"
                " before them began"
            )
        if (op.placed.consumes, op.placed.produces) != (Replicate(), Replicate()):
            raise PlacementError(
                f"step '{op.name}' adds what step '{before.name}' gives to the residual stream, which is"
                f" whole, but takes {op.placed.consumes} and gives {op.placed.produces}"
            )


def _axis(op: Op, mesh: Mesh) -> str:
    return f"{op.placed.axis} ({mesh.features(op.placed.axis).size} ranks)"


def input_layout(op: Op, span: int, mesh: Mesh) -> Layout:
    """Where a step's input lies when it runs in `span`."""
    return _layout(span, op.placed.consumes, mesh.features(op.placed.axis).size)


def step_seconds(op: Op, after: Layout, ways: Ways, load: Load) -> float:
    """What a step takes whose output lies in `after`."""
    before = input_layout(op, after.span, ways.mesh)
    return op.seconds(ways.rows(after.span), (_parts(before), _parts(after)), load, ways.hardware)


def fused_seconds(op: Op, move: Move, ways: Ways, load: Load) -> float:
    """What an adding step takes as one instruction with the move ahead of it."""
    fusion = FUSIONS[move.kind]
    rows = ways.rows(move.after.span)
    saved = fusion.launches * ways.hardware.launch
    saved += fusion.passes * rows * op.takes * op.element / ways.hardware.memory
    alone = step_seconds(op, move.after, ways, load)
    return ways.seconds(move, Tensor(op.takes, op.element)) + max(alone - saved, 0.0)


def _forms(op: Op, ways: Ways, load: Load) -> list[Form]:
    """Every way to run a step: in its own span if it reads other tokens or begins the stream, else in each
    that its ranks divide.
    """
    what, mesh = op.placed, ways.mesh
    split = what.consumes != Replicate() or what.produces != Replicate()
    over = mesh.features(what.axis).size if split else 1
    home = what.mixes or what.residual == "begin"
    found: list[Form] = []
    for span in (mesh.attention_span,) if home else spans(mesh):
        if span % over == 0:
            before, after = input_layout(op, span, mesh), _layout(span, what.produces, over)
            seconds = step_seconds(op, after, ways, load)
            found.append(Form(before, after, seconds))
            if what.residual == "add_norm":
                found += _fused(op, after, ways, load)
    if op.travel is not None and mesh.ep > 1:
        after = placed(mesh.moe_tp, Partial(), mesh.moe_tp)
        seconds = sum(op.travel_seconds(ways.rows(mesh.moe_tp), mesh.ep, load, ways.hardware))
        found.append(Form(Layout(mesh.moe_tp), after, seconds, travel=mesh.axis("ep")))
    return found


def _fused(op: Op, after: Layout, ways: Ways, load: Load) -> list[Form]:
    """The step together with each kind of move ahead of it that there is a fused form of."""
    found: list[Form] = []
    sums = [Layout(span, Partial(), over) for span in spans(ways.mesh) for over in spans(ways.mesh)]
    for before in sums:
        if before.over == 1 or before.span % before.over:
            continue
        for kind, over, then in edges(before, ways.mesh, Tensor(op.takes, op.element)):
            if kind in FUSIONS and then == after:
                move = Move(kind, "x", over, before, after)
                found.append(Form(before, after, fused_seconds(op, move, ways, load), move))
    return found


def _layout(span: int, placement: Placement, over: int) -> Layout:
    match placement:
        case Replicate():
            return Layout(span)
        case Shard(dim):
            return placed(span, Shard(dim), over)
        case Partial():
            return placed(span, Partial(), over)


def _parts(layout: Layout) -> int:
    return layout.over if isinstance(layout.placement, Shard) else 1


def _keep(
    found: dict[State, _Reached],
    state: State,
    before: State,
    reached: _Reached,
    seconds: float,
    added: tuple[Instruction, ...],
) -> None:
    """Notes a way to `state` if it's the first or the cheapest; of equals the shorter."""
    total, length = reached.seconds + seconds, reached.length + len(added)
    known = found.get(state)
    if known is None or (total, length) < (known.seconds, known.length):
        found[state] = _Reached(total, length, before, added)


def _walk_back(layers: Sequence[dict[State, _Reached]], end: State) -> tuple[Instruction, ...]:
    state: State | None = end
    pieces: list[tuple[Instruction, ...]] = []
    for states in reversed(layers):
        assert state is not None
        reached = states[state]
        pieces.append(reached.added)
        state = reached.before
    return tuple(instruction for piece in reversed(pieces) for instruction in piece)
