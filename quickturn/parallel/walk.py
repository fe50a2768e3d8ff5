"""A compiled program made ready to run on one rank: each instruction a function of what flows through it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quickturn.layers.forward import ForwardBatch
from quickturn.layers.norm import AddNorm
from quickturn.parallel.collectives import Collectives
from quickturn.parallel.exchange import Mixing, exchanged
from quickturn.parallel.placement import Step
from quickturn.parallel.program import (
    Dispatch,
    Fused,
    Instruction,
    Move,
    Program,
    Programs,
    Rows,
    RunStep,
    Select,
)


@dataclass(slots=True)
class Flow:
    """What instructions change: activations, residual stream, and how many tokens lie where."""

    x: torch.Tensor
    residual: torch.Tensor
    batch: ForwardBatch
    rows: Rows


Action = Callable[[Flow], None]


@dataclass(frozen=True)
class Ready:
    """A program as functions: those for all tokens, and from `Select` on those for the sampled ones."""

    body: tuple[Action, ...]
    tail: tuple[Action, ...]


def ready(program: Program, steps: Sequence[Step], collectives: Collectives) -> Ready:
    """The program of this rank, which holds `steps`."""
    found = [_action(instruction, program, steps, collectives) for instruction in program.instructions]
    behind = next((at for at, one in enumerate(program.instructions) if isinstance(one, Select)), len(found))
    return Ready(tuple(found[:behind]), tuple(found[behind:]))


def run(
    programs: Sequence[Ready],
    which: Programs,
    batch: ForwardBatch,
    vocab: int,
    slices: Sequence[torch.Tensor] = (),
    take: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Carries out, on this rank, the program for this batch, one of `programs`: float32 logits `[S, vocab]`
    of the group's sampled tokens, on each of its ranks.

    Before that, `take` gets the logits of each of `slices`, indexes of tokens; where there are several groups
    of requests, all have the same number of them, and `batch.dp_slices` says how long.
    """
    ids = batch.token_ids
    own = batch.dp_tokens or (ids.shape[0],)
    program = programs[which.choose(max(own))]
    flow = Flow(ids, ids, batch, Rows(which.mesh, own))
    if any(own):
        for action in program.body:
            action(flow)
    for rows, counts in zip(slices, batch.dp_slices or [()] * len(slices), strict=True):
        assert take is not None
        taken = replace(batch, sample_rows=rows, dp_samples=counts)
        take(_logits(program, replace(flow, batch=taken), vocab))
    return _logits(program, flow, vocab)


def _logits(program: Ready, flow: Flow, vocab: int) -> torch.Tensor:
    for action in program.tail:
        if not any(flow.rows.own):
            return torch.empty((0, vocab), dtype=torch.float32, device=flow.x.device)
        action(flow)
    # Ranks that can't share out the vocabulary equally have filled up theirs.
    return flow.x if flow.x.shape[1] == vocab else flow.x[:, :vocab].contiguous()


def _action(
    instruction: Instruction, program: Program, steps: Sequence[Step], collectives: Collectives
) -> Action:
    match instruction:
        case RunStep():
            return _run(steps[instruction.step])
        case Select():
            return partial(_select, program=program)
        case Fused():
            return _fused(instruction, program, steps[instruction.step], collectives)
        case Dispatch():
            return _dispatch(instruction, steps[instruction.step], collectives)
        case Move():
            return _move(instruction, program, collectives)


def _run(step: Step) -> Action:
    def action(flow: Flow) -> None:
        flow.x = step.run(flow.x, flow.residual, flow.batch)
        if step.residual == "begin":
            flow.residual = flow.x

    return action


def _select(flow: Flow, program: Program) -> None:
    rows, groups = flow.batch.sample_rows, flow.batch.dp_samples
    if rows is not None:
        flow.x, flow.residual = flow.x.index_select(0, rows), flow.residual.index_select(0, rows)
    flow.rows = Rows(program.mesh, groups or (flow.x.shape[0],))


def _move(instruction: Move, program: Program, collectives: Collectives) -> Action:
    moved = _mover(instruction, program, collectives)

    def activations(flow: Flow) -> None:
        flow.x = moved(flow.x, flow.rows)

    def stream(flow: Flow) -> None:
        flow.residual = moved(flow.residual, flow.rows)

    return activations if instruction.tensor == "x" else stream


def _dispatch(instruction: Dispatch, step: Step, collectives: Collectives) -> Action:
    mixing, over, span = step.run, instruction.over, instruction.before.span
    assert isinstance(mixing, Mixing), step.name
    members = over.members(collectives.rank)

    def action(flow: Flow) -> None:
        held = [flow.rows.held(span, rank) for rank in members]
        flow.x = exchanged(flow.x, mixing, over, collectives, held)

    return action


def _fused(instruction: Fused, program: Program, step: Step, collectives: Collectives) -> Action:
    norm = step.run
    assert isinstance(norm, AddNorm), step.name
    over = instruction.over
    if instruction.kind == "all_reduce_add_norm":

        def reduced(flow: Flow) -> None:
            flow.x = collectives.all_reduce_add_norm(flow.x, flow.residual, norm.weight, norm.eps, over)

        return reduced
    own, rank = program.mesh.attention_span, collectives.rank

    def scattered(flow: Flow) -> None:
        x = _filled(flow.x, flow.rows.at(own, rank)) if instruction.before.span == own else flow.x
        counts = _counts(flow.rows, instruction.after.span, over.members(rank))
        flow.x = collectives.reduce_scatter_add_norm(x, flow.residual, norm.weight, norm.eps, over, counts)

    return scattered


def _mover(
    move: Move, program: Program, collectives: Collectives
) -> Callable[[torch.Tensor, Rows], torch.Tensor]:
    """What a move does to the activations (or the stream) of this rank."""
    own, before, after = program.mesh.attention_span, move.before.span, move.after.span
    rank, over = collectives.rank, move.over

    def moved(x: torch.Tensor, rows: Rows) -> torch.Tensor:
        if before == own != after:
            x = _filled(x, rows.at(own, rank))
        match move.kind:
            case "all_reduce":
                return collectives.all_reduce(x, over)
            case "slice_features":
                return x.chunk(over.size, -1)[over.index(rank)].contiguous()
            case "all_gather_features":
                return collectives.all_gather(x, over, -1)
            case "reduce_scatter_features":
                return collectives.reduce_scatter(x, over, -1)
            case "slice_tokens":
                x = x.narrow(0, _first(rows, after, before, rank), rows.at(after, rank))
            case "all_gather_tokens":
                x = collectives.all_gather(x, over, 0, _counts(rows, before, over.members(rank)))
            case "reduce_scatter_tokens":
                x = collectives.reduce_scatter(x, over, 0, _counts(rows, after, over.members(rank)))
            case "all_to_all_to_tokens":
                x = collectives.all_to_all(x, over, 0, -1, _counts(rows, after, over.members(rank)))
            case "all_to_all_to_features":
                x = collectives.all_to_all(x, over, -1, 0, _counts(rows, before, over.members(rank)))
        return x[: rows.own[rank // own]] if after == own else x

    return moved


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def _first(rows: Rows, span: int, within: int, rank: int) -> int:
    """Where the rows of `rank` in `span` begin among those of the larger span `within`."""
    return sum(rows.unit(other) for other in range(rank // within * within, rank // span * span))


def _counts(rows: Rows, span: int, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Rows of each rank; None where all have the same."""
    counts = tuple(rows.at(span, rank) for rank in ranks)
    return None if len(set(counts)) == 1 else counts
