"""Collectives between processes against what they mean, on tensors of every shape and dtype that travels."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from crew import GROUPS, Crew
from quickturn_kernels import add_rms_norm

from quickturn.parallel import communicator
from quickturn.parallel.collectives import Alone
from quickturn.parallel.communicator import connect
from quickturn.parallel.mesh import Groups, Mesh, make_mesh


def values(rank: int, shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank of the world contributes: whole numbers, so small that bfloat16 holds every sum here."""
    generator = torch.Generator().manual_seed(seed * 16 + rank)
    return torch.randint(-16, 17, tuple(shape), generator=generator).to(dtype)


def check(rank: int, mesh: Mesh, groups: list[Groups], counts_of: list[list[int]], seed: int) -> None:
    """Every collective over every kind of group; meshes smaller than the world lie side by side."""
    first = rank // mesh.world * mesh.world
    here = connect(mesh, made=GROUPS, first=first)
    here.use(groups)
    for over, counts in zip(groups, counts_of, strict=True):
        members = [first + member for member in over.members(rank - first)]
        place, size = over.index(rank - first), over.size
        of = counts[:size]
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            whole = [values(member, (6, 4 * size), seed, dtype) for member in members]
            total = torch.stack(whole).sum(0)
            mine = whole[place]
            assert_same(here.all_reduce(mine.clone(), over), total)
            for dim in (0, 1, -1):
                assert_same(here.all_gather(mine, over, dim), torch.cat(whole, dim))
            assert_same(here.reduce_scatter(mine, over, -1), total.chunk(size, -1)[place])
            tall = [x.repeat(size, 1) for x in whole]
            assert_same(
                here.reduce_scatter(tall[place], over, 0), torch.stack(tall).sum(0).chunk(size, 0)[place]
            )
            sent = torch.cat([x.chunk(size, 1)[place] for x in whole])
            assert_same(here.all_to_all(mine, over, 1, 0), sent)
            assert_same(here.all_to_all(sent, over, 0, 1), mine)
            # Ranks with tokens of their own, some with none.
            own = [x.repeat(2, 1)[:count] for x, count in zip(whole, of, strict=True)]
            together = torch.cat(own)
            assert_same(here.all_gather(own[place], over, 0, of), together)
            summands = [together * (member + 1) for member in members]
            part = torch.stack(summands).sum(0).split(of)[place]
            assert_same(here.reduce_scatter(summands[place], over, 0, of), part)
            spread = here.all_to_all(own[place], over, 1, 0, of)
            assert_same(spread, torch.cat([x.chunk(size, 1)[place] for x in own]))
            assert_same(here.all_to_all(spread, over, 0, 1, of), own[place])
    over = Groups(mesh.world)
    x = [values(first + member, (5, 24), seed) for member in range(mesh.world)]
    stream, weight = values(0, (5, 24), seed + 1), values(0, (24,), seed + 2)
    want = stream.clone()
    normed = add_rms_norm(torch.stack(x).sum(0), want, weight, 1e-6)
    got = stream.clone()
    assert_same(here.all_reduce_add_norm(x[rank - first].clone(), got, weight, 1e-6, over), normed)
    assert_same(got, want)
    counts = [5 - member for member in range(mesh.world)]
    wide = [values(first + member, (sum(counts), 24), seed + 3) for member in range(mesh.world)]
    start = sum(counts[: rank - first])
    mine = values(rank, (counts[rank - first], 24), seed + 4)
    want, got = mine.clone(), mine.clone()
    total = torch.stack(wide).sum(0)[start : start + mine.shape[0]]
    normed = add_rms_norm(total, want, weight, 1e-6)
    assert_same(here.reduce_scatter_add_norm(wide[rank - first], got, weight, 1e-6, over, counts), normed)
    assert_same(got, want)
    here.barrier()


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    assert torch.equal(got, want)


MESHES = {
    "one": make_mesh(),
    "two": make_mesh(tp=2),
    "four": make_mesh(tp=4),
    "square": make_mesh(tp=2, dp=2, ep=2, dense_tp=2),
}


@pytest.mark.parametrize("name", MESHES)
def test_collectives(crew: Crew, name: str, seed: int) -> None:
    mesh = MESHES[name]
    numbers = random.Random(seed)
    groups = [Groups(mesh.world), mesh.axis("tp"), mesh.axis("dp"), mesh.axis("ep"), Groups(1)]
    counts = [[numbers.choice((0, 0, 3, 5, 12)) for _ in range(4)] for _ in groups]
    crew.run(check, mesh, groups, counts, seed)


def by_way_of_the_host(rank: int, *arguments: Any) -> int:
    """As between ranks that share a GPU. Returns how many collectives were copied."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicator, "_on_gpu", lambda x: True)
        made: list[Any] = []
        patch.setattr(communicator.Communicator, "barrier", lambda self: made.append(self))
        check(rank, *arguments)
    return int(made[0].copies)


def test_collectives_by_way_of_the_host(crew: Crew, seed: int) -> None:
    mesh = MESHES["square"]
    groups, counts = [Groups(mesh.world), mesh.axis("tp")], [[3, 0, 5, 2], [4, 0, 0, 0]]
    assert min(crew.run(by_way_of_the_host, mesh, groups, counts, seed)) > 50


def same_bits(rank: int, seed: int) -> list[bytes]:
    """Sums whose order shows, as every rank has them."""
    here = connect(make_mesh(tp=4), made=GROUPS)
    found = []
    for size in (1, 7, 1000, 70_000):
        x = values(rank, (size,), seed) / 7 * torch.logspace(-3, 3, size)
        found.append(here.all_reduce(x, Groups(4)).numpy().tobytes())
    return found


def test_every_rank_has_the_same_bits(crew: Crew, seed: int) -> None:
    found = crew.run(same_bits, seed)
    assert all(other == found[0] for other in found)


def test_one_rank_does_nothing() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    alone = Alone()
    assert alone.all_reduce(x, Groups(1)) is x
    assert alone.all_gather(x, Groups(1), 0) is x
    assert alone.reduce_scatter(x, Groups(1), 0) is x
    assert alone.all_to_all(x, Groups(1), 0, 1) is x
    expected = residual.clone()
    normed = add_rms_norm(x, expected, weight, 1e-6)
    assert torch.equal(alone.all_reduce_add_norm(x, residual, weight, 1e-6, Groups(1)), normed)
    assert torch.equal(residual, expected)
