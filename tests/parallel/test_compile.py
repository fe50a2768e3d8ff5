"""Compiled programs, on ranks in numpy, compute what the whole model computes, and are the cheapest ones."""

from dataclasses import replace

import numpy as np
import pytest
from numpy_ranks import (
    HIDDEN,
    VOCAB,
    Node,
    NumpyRanks,
    any_hardware,
    dense,
    load_of,
    meshes,
    random_graph,
)

from quickturn.parallel import compile as compiler
from quickturn.parallel.compile import compile_program
from quickturn.parallel.cost import Hardware, Load
from quickturn.parallel.mesh import Mesh
from quickturn.parallel.moves import Tensor, Ways, edges
from quickturn.parallel.placement import Partial, PlacementError, Replicate, Shard
from quickturn.parallel.program import Dispatch, Fused, Layout, Move, Program, Select

CASES = 40


def any_mesh(rng: np.random.Generator) -> Mesh:
    found = meshes(int(rng.choice([1, 2, 3, 4, 6, 8])))
    return found[rng.integers(len(found))]


def check(rng: np.random.Generator) -> Program:
    """One random model on one random mesh, with other numbers of tokens in each group."""
    mesh = any_mesh(rng)
    nodes, tail = random_graph(rng, int(rng.integers(2, 14)))
    own = rng.integers(0, 8, mesh.dp).tolist()
    ids = [rng.integers(0, VOCAB, tokens).astype(float) for tokens in own]
    rows = [np.sort(rng.permutation(tokens)[: rng.integers(0, tokens + 1)]) for tokens in own]
    ops = [node.op for node in nodes]
    program = compile_program(ops, tail, mesh, load_of(own), any_hardware(rng))
    given = NumpyRanks(mesh, nodes, ids, rows).run(program)
    for rank, found in enumerate(given):
        group = rank // mesh.attention_span
        selected = rows[group] if Select() in program.instructions else np.arange(own[group])
        wanted = dense(nodes, tail, ids[group], selected)
        np.testing.assert_allclose(found, wanted, rtol=1e-7, atol=1e-7, err_msg=f"{mesh}, rank {rank}")
    return program


def test_ranks_compute_the_whole_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for case in range(CASES):
        print("case", case)
        check(rng)


def test_random_cases_use_every_instruction() -> None:
    """What the test above would miss, it can't be trusted with."""
    rng = np.random.default_rng(7)
    found: set[str] = set()
    for _ in range(150):
        for instruction in check(rng).instructions:
            if isinstance(instruction, Move | Fused):
                found.add(instruction.kind)
            if isinstance(instruction, Move) and instruction.tensor == "residual":
                found.add(f"{instruction.kind} of the stream")
            if isinstance(instruction, Dispatch):
                found.add(f"dispatch over {'all' if instruction.before.span == 1 else 'some'} ranks")
    assert found >= {
        "slice_tokens", "slice_features", "all_reduce", "all_gather_tokens", "all_gather_features",
        "reduce_scatter_tokens", "reduce_scatter_features", "all_to_all_to_tokens", "all_to_all_to_features",
        "all_reduce_add_norm", "reduce_scatter_add_norm", "slice_tokens of the stream",
        "all_gather_tokens of the stream", "dispatch over all ranks", "dispatch over some ranks",
    }  # fmt: skip


def least_seconds(have: Layout, tensor: Tensor, ways: Ways) -> dict[Layout, float]:
    """Seconds to every layout, by relaxing every move until nothing gets cheaper (Bellman and Ford)."""
    found, changed = {have: 0.0}, True
    while changed:
        changed = False
        for layout, seconds in list(found.items()):
            for kind, over, after in edges(layout, ways.mesh, tensor):
                total = seconds + ways.seconds(Move(kind, "x", over, layout, after), tensor)
                if total < found.get(after, np.inf):
                    found[after], changed = total, True
    return found


def cheapest(
    nodes: list[Node], mesh: Mesh, load: Load, hardware: Hardware, at: int, layout: Layout, stream: int
) -> float:
    """Seconds of the rest of a program, by trying every form of every step."""
    ways = Ways(mesh, load.tokens, hardware)
    before = nodes[at - 1].op if at else None
    tensor = Tensor(before.gives, before.gives_element, before.joined) if before else Tensor(0)
    moved = least_seconds(layout, tensor, ways)
    if at == len(nodes):
        return moved[Layout(mesh.attention_span)]
    op, found = nodes[at].op, np.inf
    for form in compiler._forms(op, ways, load):
        seconds, then = form.seconds + moved.get(form.before, np.inf), stream
        if op.placed.residual == "add_norm":
            then = form.after.span
            seconds += least_seconds(Layout(stream), Tensor(HIDDEN), ways)[Layout(then)]
        if op.placed.residual == "begin":
            then = form.after.span
        if np.isfinite(seconds):
            seconds += cheapest(nodes, mesh, load, hardware, at + 1, form.after, then)
        found = min(found, seconds)
    return found


def test_the_search_finds_the_cheapest_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    small = meshes(2) + meshes(4)
    for _ in range(12):
        mesh = small[rng.integers(len(small))]
        nodes, _ = random_graph(rng, 3)
        hardware, load = any_hardware(rng), Load(int(rng.integers(1, 9)), 1, 1, 16)
        program = compile_program([node.op for node in nodes], len(nodes), mesh, load, hardware)
        by_hand = cheapest(nodes, mesh, load, hardware, 0, Layout(mesh.attention_span), 0)
        assert program.seconds == pytest.approx(by_hand, rel=1e-9), mesh


def test_one_rank_moves_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    nodes, tail = random_graph(rng, 12)
    program = compile_program([node.op for node in nodes], tail, Mesh(), Load(8, 2, 2, 16))
    assert not any(isinstance(instruction, Move | Fused) for instruction in program.instructions)


def graph_with(rng: np.random.Generator, names: list[str]) -> list[Node]:
    """A random graph in which these steps follow each other at its end."""
    while True:
        nodes, _ = random_graph(rng, 8)
        found = [node.op.name.split(".")[0] for node in nodes]
        for at in range(len(found) - len(names) + 1):
            if found[at : at + len(names)] == names:
                return nodes[: at + len(names)]


@pytest.mark.parametrize(
    ("names", "change", "words"),
    [
        (["norm", "mixture"], {"consumes": Partial()}, "nothing converts"),
        (["row", "norm"], {"consumes": Partial()}, None),
        (["row", "add"], {"consumes": Shard(-1)}, "the residual stream, which is whole, but takes Shard"),
    ],
)
def test_steps_that_dont_fit_are_named(
    names: list[str], change: dict[str, object], words: str | None
) -> None:
    nodes = graph_with(np.random.default_rng(5), names)
    last = nodes[-1].op
    ops = [*(node.op for node in nodes[:-1]), replace(last, placed=replace(last.placed, **change))]
    mesh = Mesh(tp=2, dense_tp=2, moe_tp=2)
    if words is None:
        # Summands of the same ranks: legal where steps want them, and the end makes them whole.
        compile_program(ops, len(ops), mesh, Load(4, 4, 4, 16))
        return
    with pytest.raises(PlacementError, match=words) as raised:
        compile_program(ops, len(ops), mesh, Load(4, 4, 4, 16))
    assert f"'{ops[-2].name}'" in str(raised.value)
    assert f"'{ops[-1].name}'" in str(raised.value)


def test_matrices_side_by_side_are_never_cut_as_one() -> None:
    """A fused projection's parts are parts of each matrix: other ranks can't make theirs of them."""
    nodes = graph_with(np.random.default_rng(5), ["column", "row"])
    ops = [node.op for node in nodes]
    ops[-2] = replace(ops[-2], placed=replace(ops[-2].placed, axis="attn"), joined=True)
    ops[-1] = replace(ops[-1], placed=replace(ops[-1].placed, axis="dense"))
    with pytest.raises(PlacementError, match=r"on attn \(4 ranks\) to Shard\(dim=-1\) on dense \(2 ranks\)"):
        compile_program(ops, len(ops), Mesh(tp=4, dense_tp=2, moe_tp=4), Load(4, 4, 4, 16))
    ops[-2] = replace(ops[-2], joined=False)
    compile_program(ops, len(ops), Mesh(tp=4, dense_tp=2, moe_tp=4), Load(4, 4, 4, 16))


def test_a_stream_that_nobody_began_is_named() -> None:
    nodes = graph_with(np.random.default_rng(5), ["row", "add"])
    ops = [node.op for node in nodes]
    ops[0] = replace(ops[0], placed=replace(ops[0].placed, residual="none"))
    with pytest.raises(PlacementError, match="no step before them began"):
        compile_program(ops, len(ops), Mesh(), Load(4, 4, 4, 16))


def test_widths_that_dont_fit_are_named() -> None:
    nodes = graph_with(np.random.default_rng(5), ["column", "row"])
    ops = [node.op for node in nodes]
    ops[-1] = replace(ops[-1], takes=ops[-1].takes + 1)
    with pytest.raises(PlacementError, match=r"step 'column.*' gives .* but step 'row.*' behind it takes"):
        compile_program(ops, len(ops), Mesh(), Load(4, 4, 4, 16))


def test_layouts_say_where_a_tensor_lies() -> None:
    shown = [str(layout) for layout in (Layout(4), Layout(4, Shard(-1), 2), Layout(2, Partial(), 2))]
    assert shown == ["whole | 4", "1/2 | 4", "sum of 2 | 2"]
    assert Layout(1, Replicate()) == Layout(1)
