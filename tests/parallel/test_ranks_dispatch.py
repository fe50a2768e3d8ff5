"""Tokens that travel to their experts between processes: what one rank makes of them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import get_args
from unittest import mock

import pytest
import torch
from crew import GROUPS, Crew
from families import tolerance, write
from numpy_ranks import restless
from quickturn_kernels import prepare_linear
from safetensors.torch import load_file, save_file
from scripted import Served, alone, compare, serve

from quickturn.layers.moe import Mixture, Router, Routing, SharedExpert, prepare_experts
from quickturn.loading.checkpoint import read_config
from quickturn.models.base import Architecture, tail_of
from quickturn.models.plan import ops_of
from quickturn.models.registry import architecture_of
from quickturn.parallel.collectives import Alone
from quickturn.parallel.communicator import connect
from quickturn.parallel.compile import compile_programs
from quickturn.parallel.cost import H200, Collective, Exchange
from quickturn.parallel.exchange import exchanged
from quickturn.parallel.mesh import Groups, Mesh, make_mesh
from quickturn.parallel.program import Programs

SEED = 5
RECORDED = "quickturn.parallel.exchange.recorded"


def rows_of(rank: int, to: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What one rank has for another."""
    return (torch.arange(count * 3).reshape(count, 3) + 17 * rank + 31 * to).to(dtype)


def check_rows(rank: int, mesh: Mesh, over: Groups, counts: list[list[int]]) -> None:
    """`counts[i][j]`: rows of the i-th rank of a group for the j-th."""
    here = connect(mesh, made=GROUPS)
    here.use([over])
    place = over.index(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        parts = [rows_of(place, to, count, dtype) for to, count in enumerate(counts[place])]
        sent, came = here.exchange_counts(torch.tensor(counts[place]), over)
        assert list(sent) == counts[place]
        assert list(came) == [of[place] for of in counts]
        got = here.dispatch(torch.cat(parts), over, sent, came)
        want = [rows_of(other, place, of[place], dtype) for other, of in enumerate(counts)]
        assert got.dtype == dtype
        assert torch.equal(got, torch.cat(want))
        assert torch.equal(here.combine(got, over, sent, came), torch.cat(parts))


@pytest.mark.parametrize("over", [Groups(4), Groups(2), Groups(2, 2)], ids=["four", "pairs", "strided"])
def test_rows_go_where_they_are_sent_and_come_back(crew: Crew, over: Groups, seed: int) -> None:
    numbers = random.Random(seed)
    some = [[numbers.choice((0, 0, 1, 2, 7)) for _ in range(over.size)] for _ in range(over.size)]
    nothing = [[0] * over.size for _ in range(over.size)]
    to_one = [[5] + [0] * (over.size - 1) for _ in range(over.size)]
    for counts in (some, nothing, to_one):
        crew.run(check_rows, make_mesh(dp=4), over, counts)


def test_one_rank_keeps_its_rows() -> None:
    x, alone_ = torch.randn(5, 3), Alone()
    assert alone_.exchange_counts(torch.tensor([5]), Groups(1)) == ([5], [5])
    assert alone_.dispatch(x, Groups(1), [5], [5]) is x
    assert alone_.combine(x, Groups(1), [5], [5]) is x


HIDDEN, INNER, EXPERTS, TOP_K = 16, 8, 8, 3


def mixture(ranks: int, index: int, favourite: int | None) -> Mixture:
    """The `index`-th of `ranks` parts of a mixture, its shared expert whole. `favourite`: one that all tokens
    take alone.
    """
    numbers = torch.Generator().manual_seed(3)

    def random_(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers) / shape[-1] ** 0.5

    gate_up, down, router = (
        random_(EXPERTS, 2 * INNER, HIDDEN),
        random_(EXPERTS, HIDDEN, INNER),
        random_(EXPERTS, HIDDEN),
    )
    shared = SharedExpert(
        prepare_linear(random_(2 * INNER, HIDDEN)), prepare_linear(random_(HIDDEN, INNER)), random_(1, HIDDEN)
    )
    routing, bias = Routing(TOP_K), None
    if favourite is not None:
        routing, bias = Routing(1), torch.zeros(EXPERTS)
        bias[favourite] = 1e4
    each = EXPERTS // ranks
    mine = slice(index * each, (index + 1) * each)
    experts = prepare_experts(gate_up[mine].contiguous(), down[mine].contiguous())
    first = None if ranks == 1 else index * each
    return Mixture(Router(prepare_linear(router), routing, bias), experts, shared, first, True, shared)


def tokens_of(rank: int, counts: list[int]) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100 + rank)
    return torch.randn((counts[rank], HIDDEN), generator=numbers)


def mix_on(rank: int, ep: int, counts: list[int], favourite: int | None, recorded: bool) -> torch.Tensor:
    """This rank's tokens, by mixtures of which each rank of a group has a part; groups lie side by side."""
    here = connect(make_mesh(dp=ep, ep=ep), made=GROUPS, first=rank // ep * ep)
    over = Groups(ep)
    first = rank // ep * ep
    held = counts[first : first + ep]
    part = mixture(ep, rank - first, favourite)
    with mock.patch(RECORDED, return_value=recorded):
        return exchanged(tokens_of(rank, counts), part, over, here, held)


COUNTS = {
    "uneven": [5, 1, 9, 2],
    "none on some": [0, 6, 0, 1],
    "none at all": [0, 0, 0, 0],
    "one": [0, 0, 1, 0],
}


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("favourite", [None, 0, 5])
def test_tokens_get_what_the_whole_mixture_makes(
    crew: Crew, ep: int, counts: str, favourite: int | None
) -> None:
    held = COUNTS[counts]
    counted = crew.run(mix_on, ep, held, favourite, False)
    padded = crew.run(mix_on, ep, held, favourite, True)
    whole = mixture(1, 0, favourite)
    for rank in range(4):
        x = tokens_of(rank, held)
        want = whole.mix(x, *whole.choose(x)) + whole.beside(x) if held[rank] else x
        torch.testing.assert_close(counted[rank], want, atol=2e-5, rtol=2e-5, msg=f"rank {rank}")
        # Rows that want nothing change nothing.
        assert torch.equal(counted[rank], padded[rank])


EFFICIENCY = {"all_to_all": 1e6, "all_reduce": 0.01}
MACHINE = replace(
    restless(H200),
    link=1e6,
    exchanges=tuple((kind, Exchange(0.0, 0.0, EFFICIENCY.get(kind, 1.0))) for kind in get_args(Collective)),
)
"""Bytes are all that counts; to bring all tokens together and to share out the sums takes longest."""


def restless_programs(architecture: Architecture, mesh: Mesh) -> Programs:
    """The programs for a machine on which tokens like to travel."""
    tail = tail_of(architecture.declarations())
    return compile_programs(ops_of(architecture, mesh), tail, mesh, MACHINE)


def serve_restless(rank: int, path: str, mesh: Mesh, seed: int, recorded: bool) -> Served | None:
    """As `serve`; `recorded`: as if in a CUDA graph."""
    with (
        mock.patch("quickturn.loading.load.programs_of", restless_programs),
        mock.patch(RECORDED, return_value=recorded),
    ):
        return serve(rank, path, mesh, seed)


MESHES = {
    "dp2": make_mesh(dp=2, ep=2),
    "tp2": make_mesh(tp=2, ep=2),
    "dp4": make_mesh(dp=4, ep=4),
    "tp4": make_mesh(tp=4, ep=4),
    "tp2dp2": make_mesh(tp=2, dp=2, ep=4),
    "tp2dp2, ep 2": make_mesh(tp=2, dp=2, ep=2),
    "tp4, ep 2": make_mesh(tp=4, ep=2),
    "dp2cp2": make_mesh(dp=2, cp=2, ep=4),
}
CASES = {
    "qwen3-moe": ("dp2", "tp2", "dp4", "tp4", "tp2dp2", "tp2dp2, ep 2", "tp4, ep 2"),
    "qwen3-next": ("dp2", "tp2", "dp4", "tp4", "tp2dp2, ep 2", "dp2cp2"),
    "gpt-oss": ("dp4", "tp2dp2, ep 2"),
}
"""Two ranks and four; experts whole on a rank or their inner features over two; a shared expert; biases."""


@pytest.mark.parametrize("option", CASES)
def test_a_family_whose_tokens_travel(crew: Crew, option: str, tmp_path: Path) -> None:
    write(option, tmp_path)
    path = str(tmp_path)
    want = alone(path, SEED)
    for name in CASES[option]:
        mesh = MESHES[name]
        print(name)
        check_travels(path, mesh)
        for recorded in (False, True):
            compare(want, crew.run(serve_restless, path, mesh, SEED, recorded), mesh, tolerance(option))


def check_travels(path: str, mesh: Mesh) -> None:
    """Every mixture is dispatched in every program; the last one has other neighbours, and may not be."""
    architecture = architecture_of(read_config(Path(path)))
    steps = [step.name for step in architecture.declarations()]
    mixtures = {steps.index(step.name) for step in architecture.mixtures()}
    for program in restless_programs(architecture, mesh).programs:
        found = Programs((program,)).dispatched
        assert mixtures - {max(mixtures)} <= found <= mixtures, mesh


@pytest.mark.parametrize("option", ["qwen3-moe", "qwen3-next"])
def test_all_tokens_take_the_first_ranks_experts(crew: Crew, option: str, tmp_path: Path) -> None:
    write(option, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    assert routers
    # Of equals a router takes the first.
    save_file({name: x * 0 if name in routers else x for name, x in tensors.items()}, file, {"format": "pt"})
    want = alone(str(tmp_path), SEED)
    for name in ("dp2", "dp4", "tp2dp2, ep 2"):
        got = crew.run(serve_restless, str(tmp_path), MESHES[name], SEED, False)
        compare(want, got, MESHES[name], tolerance(option))
