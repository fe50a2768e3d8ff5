"""What carries programs out on real ranks does so: random models on threads, with the engine's own walk."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from numpy_ranks import EXPERTS, VOCAB, Node, any_hardware, dense, load_of, meshes, random_graph
from quickturn_kernels import add_rms_norm

from quickturn.layers.forward import ForwardBatch
from quickturn.layers.norm import AddNorm
from quickturn.parallel import walk
from quickturn.parallel.collectives import Counts
from quickturn.parallel.compile import compile_program
from quickturn.parallel.mesh import Groups, Mesh
from quickturn.parallel.placement import Step
from quickturn.parallel.program import Programs

SECONDS = 60


@dataclass
class Threads:
    """What ranks put down for each other."""

    world: int
    table: list[torch.Tensor] = field(init=False)
    messages: list[list[torch.Tensor]] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.table = [torch.empty(0)] * self.world
        self.messages = [[] for _ in range(self.world)]
        self.barrier = threading.Barrier(self.world, timeout=SECONDS)


class OnThreads:
    """A rank's side of the collectives."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank = threads, rank

    def _exchange(self, x: torch.Tensor, over: Groups) -> list[torch.Tensor]:
        self.threads.table[self.rank] = x.clone()
        self.threads.barrier.wait()
        parts = [self.threads.table[member] for member in over.members(self.rank)]
        self.threads.barrier.wait()
        return parts

    def _mine(self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None) -> torch.Tensor:
        sizes = list(counts) if counts else [x.shape[dim] // over.size] * over.size
        assert sum(sizes) == x.shape[dim]
        return x.split(sizes, dim)[over.index(self.rank)]

    def all_reduce(self, x: torch.Tensor, over: Groups) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x, over)).sum(0))

    def all_gather(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        parts = self._exchange(x, over)
        assert [part.shape[dim] for part in parts] == list(counts or [x.shape[dim]] * over.size)
        return torch.cat(parts, dim)

    def reduce_scatter(
        self, x: torch.Tensor, over: Groups, dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        return self._mine(torch.stack(self._exchange(x, over)).sum(0), over, dim, counts).clone()

    def all_to_all(
        self, x: torch.Tensor, over: Groups, split_dim: int, concat_dim: int, counts: Counts | None = None
    ) -> torch.Tensor:
        split = counts if split_dim == 0 else None
        return torch.cat(
            [self._mine(part, over, split_dim, split) for part in self._exchange(x, over)], concat_dim
        )

    def all_reduce_add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, over: Groups
    ) -> torch.Tensor:
        return add_rms_norm(self.all_reduce(x, over), residual, weight, eps)

    def reduce_scatter_add_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        over: Groups,
        counts: Counts | None = None,
    ) -> torch.Tensor:
        return add_rms_norm(self.reduce_scatter(x, over, 0, counts), residual, weight, eps)

    def _ragged(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        parts = list(x.split_with_sizes(list(sent)))
        place = over.index(self.rank)
        self.threads.messages[self.rank] = [part.clone() for part in parts]
        self.threads.barrier.wait()
        found = [self.threads.messages[member][place] for member in over.members(self.rank)]
        self.threads.barrier.wait()
        assert [len(part) for part in found] == list(came)
        return torch.cat(found)

    def exchange_counts(self, sent: torch.Tensor, over: Groups) -> tuple[Counts, Counts]:
        ones = [1] * over.size
        return sent.tolist(), self._ragged(sent, over, ones, ones).tolist()

    def dispatch(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        return self._ragged(x, over, sent, came)

    def combine(self, x: torch.Tensor, over: Groups, sent: Counts, came: Counts) -> torch.Tensor:
        return self._ragged(x, over, came, sent)

    def use(self, groups: Sequence[Groups]) -> None:
        """Nothing to prepare."""

    def barrier(self) -> None:
        self.threads.barrier.wait()


@dataclass
class NumpyMixture:
    """A rank's share of a mixture, as one step and in its parts. Of the experts that ranks hold together each
    has some whole, which gives the summands that parts of all would.
    """

    node: Node
    mesh: Mesh
    rank: int
    padded: bool

    @property
    def here(self) -> int:
        return EXPERTS // self.mesh.ep

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        found = self.node.part(x.double().numpy(), x.double().numpy(), self.rank, self.mesh.world)
        return torch.from_numpy(found).float()

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.node.chosen is not None
        weights = torch.from_numpy(self.node.chosen(x.double().numpy())).float()
        return weights, torch.where(weights > 0, torch.arange(EXPERTS), -1).int()

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        assert chosen.shape == weights.shape == (len(x), EXPERTS)
        taken = torch.where(chosen >= 0, weights, 0)
        wanted, numbers = self.choose(x)
        first = self.rank // self.mesh.moe_tp * self.here
        elsewhere = (numbers < first) | (numbers >= first + self.here)
        assert torch.equal(taken, torch.where(elsewhere, 0, wanted))
        assert torch.equal(chosen.long(), torch.where(elsewhere, -1, numbers - first).long())
        assert self.padded or (chosen >= 0).any(1).all()
        found = self.node.part(x.double().numpy(), x.double().numpy(), self.rank, self.mesh.world)
        return torch.from_numpy(found).float() * (chosen >= 0).any(1, keepdim=True)

    def beside(self, x: torch.Tensor) -> torch.Tensor | None:
        return None


def step_of(node: Node, mesh: Mesh, rank: int, padded: bool) -> Step:
    """What the rank runs: the engine's own norm where it adds to the stream, else the node's in numpy.
    `padded`: a mixture gets rows that want none of its experts.
    """
    if node.chosen is not None:
        return node.op.placed.step(NumpyMixture(node, mesh, rank, padded))
    groups = mesh.features(node.op.placed.axis)

    def run(x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        found = node.part(x.double().numpy(), residual.double().numpy(), groups.index(rank), groups.size)
        return torch.from_numpy(np.ascontiguousarray(found)).float()

    adds = node.op.placed.residual == "add_norm"
    return node.op.placed.step(AddNorm(torch.from_numpy(node.norm).float(), 1e-6) if adds else run)


def batch_of(
    ids: torch.Tensor, rows: torch.Tensor, tokens: tuple[int, ...], samples: tuple[int, ...]
) -> ForwardBatch:
    empty = torch.empty(0)
    several = len(tokens) > 1
    return ForwardBatch(
        ids,
        ids,
        0,
        empty,
        empty,
        (),
        (),
        0,
        0,
        rows,
        (),
        (),
        tokens if several else (),
        samples if several else (),
    )


def on_threads(world: int, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(world) as pool:
        return [future.result(SECONDS) for future in [pool.submit(work, rank) for rank in range(world)]]


def test_threads_that_walk_a_program_compute_the_whole_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for case in range(30):
        print("case", case)
        check(rng)


def test_threads_that_may_read_nothing_back_do_so_too(seed: int) -> None:
    """As in a CUDA graph: each token has a row for every rank."""
    rng = np.random.default_rng(seed)
    with mock.patch("quickturn.parallel.exchange.recorded", return_value=True):
        for case in range(15):
            print("case", case)
            check(rng, padded=True)


def check(rng: np.random.Generator, padded: bool = False) -> None:
    every = meshes(int(rng.choice([2, 4, 6])))
    mesh = every[rng.integers(len(every))]
    nodes, tail = random_graph(rng, int(rng.integers(2, 10)))
    if tail == len(nodes):
        tail -= 1 if not nodes[-1].op.placed.mixes else 0
    own = rng.integers(1, 7, mesh.dp).tolist()
    ids = [rng.integers(0, VOCAB, tokens) for tokens in own]
    rows = [np.sort(rng.permutation(tokens)[: rng.integers(1, tokens + 1)]) for tokens in own]
    ops = [node.op for node in nodes]
    program = compile_program(ops, tail, mesh, load_of(own), any_hardware(rng))
    programs, threads = Programs((program,)), Threads(mesh.world)
    samples = tuple(len(group) for group in rows)

    def work(rank: int) -> torch.Tensor:
        group = rank // mesh.attention_span
        steps = [step_of(node, mesh, rank, padded) for node in nodes]
        ready = walk.ready(program, steps, OnThreads(threads, rank))
        batch = batch_of(torch.from_numpy(ids[group]), torch.from_numpy(rows[group]), tuple(own), samples)
        width = nodes[-1].op.gives
        if mesh.dp > 1 or tail == len(nodes):
            return walk.run((ready,), programs, batch, width)
        taken: list[torch.Tensor] = []
        slices = [torch.from_numpy(part) for part in np.array_split(np.arange(own[0]), 2)]
        last = walk.run((ready,), programs, batch, width, slices, taken.append)
        whole = dense(nodes, tail, ids[0].astype(float), np.arange(own[0]))
        np.testing.assert_allclose(torch.cat(taken).double().numpy(), whole, rtol=2e-3, atol=2e-3)
        return last

    for rank, found in enumerate(on_threads(mesh.world, work)):
        group = rank // mesh.attention_span
        selected = rows[group] if tail < len(nodes) else np.arange(own[group])
        wanted = dense(nodes, tail, ids[group].astype(float), selected)
        np.testing.assert_allclose(found.double().numpy(), wanted, rtol=2e-3, atol=2e-3, err_msg=str(mesh))
