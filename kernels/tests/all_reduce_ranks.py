"""Ranks that sum over shared memory, for `test_all_reduce.py`; a process of its own, which may be killed.

python all_reduce_ranks.py streams RANKS            all ranks in this process, on one GPU
python all_reduce_ranks.py alone RANKS              as many, of which only one comes
python all_reduce_ranks.py process RANKS RANK STORE one rank of several processes, which may share a GPU
"""

import faulthandler
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as distributed
from torch import Tensor

from quickturn_kernels import Peers, all_reduce, all_reduce_add_rms_norm, cuda_build
from quickturn_kernels.ops.all_reduce import PeerMemory, hopper
from quickturn_kernels.ops.all_reduce.peer_memory import CAPACITY, mapped, side_by_side

SHAPES = ((1, 2048), (3, 4096), (64, 5120), (33, 8), (200, 16384), (512, 4096), (1, 16384), (31, 64))
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
DEVICE = torch.device("cuda", 0)
EPS = 1e-6
PATIENCE_S = 10.0
CYCLES = 200_000
"""The longest that a rank comes late, about 100 us."""
AT_ONCE = 5
"""Replays that one rank launches before the others launch theirs. Where some thousand kernels wait, the next
launch waits as well: the host must not get there with those of one rank alone."""

Work = Generator[None, None, None]
started = time.monotonic()


def say(*words: object) -> None:
    print(f"{time.monotonic() - started:.2f} s:", *words, flush=True)


@dataclass(frozen=True)
class Rank:
    """One of the ranks that this process runs."""

    memory: PeerMemory
    stream: torch.cuda.Stream

    @property
    def number(self) -> int:
        return self.memory.rank


@dataclass(frozen=True)
class Ranks:
    """Those of this process, out of `world`."""

    world: int
    mine: Sequence[Rank]

    def do(self, work: Callable[[Rank], Work]) -> None:
        """What each rank launches, at once on the device, and by turns where it yields; returns when all have
        done it.
        """
        torch.cuda.synchronize()
        waiting = [(rank, work(rank)) for rank in self.mine]
        while waiting:
            still = []
            for rank, working in waiting:
                with torch.cuda.stream(rank.stream):
                    if next(working, self) is not self:
                        still.append((rank, working))
            waiting = still
        torch.cuda.synchronize()


@dataclass
class Case:
    """A sum over all ranks, with the norm behind it (`weight`) or not. Inputs lie in rows with more behind
    them, outputs are poisoned.
    """

    parts: list[Tensor]
    residuals: list[Tensor]
    outs: list[Tensor]
    weight: Tensor | None
    two_shots: bool
    total: Tensor
    kept: Tensor
    normed: Tensor | None

    def launch(self, rank: Rank) -> None:
        at = rank.number
        residual = None if self.weight is None else self.residuals[at]
        hopper.launch(rank.memory, self.parts[at], residual, self.weight, EPS, self.two_shots, self.outs[at])

    def check(self, rank: Rank) -> None:
        out = self.outs[rank.number]
        what = (tuple(out.shape), self.two_shots, self.weight is not None)
        assert torch.equal(self.residuals[rank.number], self.kept), what
        if self.normed is None:
            assert torch.equal(out, self.total), what
        else:
            torch.testing.assert_close(out.float(), self.normed, rtol=1.6e-2, atol=1.6e-2)


def drawn(seed: int) -> torch.Generator:
    """The same numbers in every process."""
    return torch.Generator(DEVICE).manual_seed(seed)


def strided(x: Tensor) -> Tensor:
    """x with numbers behind each row that are none."""
    wide = torch.full((x.shape[0], x.shape[1] + 8), float("nan"), dtype=x.dtype, device=DEVICE)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def normed_sum(summed: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream after `summed` was added, and its norm in float32."""
    kept = (summed.float() + residual.float()).to(summed.dtype)
    x = kept.float()
    return kept, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()


def added_up(parts: Tensor) -> Tensor:
    """In the order of the ranks, in float32, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts.dtype)


def case(
    ranks: Ranks, shape: tuple[int, int], two_shots: bool, weighted: torch.dtype | None, seed: int
) -> Case:
    """All ranks' inputs are in each process."""
    numbers = drawn(seed)
    parts = torch.randn(ranks.world, *shape, generator=numbers, device=DEVICE).bfloat16()
    residual = torch.randn(shape, generator=numbers, device=DEVICE).bfloat16()
    summed, weight, normed, kept = added_up(parts), None, None, residual
    if weighted is not None:
        weight = torch.randn(shape[1], generator=numbers, device=DEVICE).to(weighted)
        kept, normed = normed_sum(summed, residual, weight)
    return Case(
        [strided(part) for part in parts],
        [strided(residual) for _ in parts],
        [poisoned(*shape) for _ in parts],
        weight,
        two_shots,
        summed,
        kept,
        normed,
    )


def sums(ranks: Ranks, seed: int) -> None:
    """Every size in one shot and two, with and without the norm, one at a time."""
    for number, shape in enumerate(SHAPES):
        if shape[1] > 8192 and len(ranks.mine) > 2:
            continue  # all blocks of all ranks must be on the GPU at once
        for two_shots in (False, True):
            for weighted in (None, torch.bfloat16, torch.float32):
                one = case(ranks, shape, two_shots, weighted, seed + number)
                ranks.do(lambda rank, one=one: launched(rank, [one]))  # type: ignore[misc]
                for rank in ranks.mine:
                    one.check(rank)
                for out in one.outs[1:] if len(ranks.mine) > 1 else ():
                    assert torch.equal(out, one.outs[0]), "ranks have different bits"


def launched(rank: Rank, cases: Sequence[Case]) -> Work:
    for one in cases:
        one.launch(rank)
    yield


def gathers(ranks: Ranks, seed: int) -> None:
    """What every rank has, of all dtypes and sizes, with sums between."""
    numbers, generator = random.Random(seed), drawn(seed)
    parts = [
        torch.randint(0, 200, (ranks.world, 3, *size), generator=generator, device=DEVICE).to(dtype)
        for size in ((4,), (1, 3), (3, 9), (64, 512), (7, 4000))
        for dtype in numbers.sample(DTYPES, 4)
    ]
    outs = {rank.number: [torch.full_like(part, 201) for part in parts] for rank in ranks.mine}
    between = [case(ranks, (5, 64), at % 2 == 0, None, seed + at) for at in range(len(parts))]

    def work(rank: Rank) -> Work:
        for part, out, one in zip(parts, outs[rank.number], between, strict=True):
            assert rank.memory.carries(part[rank.number])
            hopper.launch_gather(rank.memory, part[rank.number], out)
            one.launch(rank)
        yield

    ranks.do(work)
    for rank in ranks.mine:
        for out, part, one in zip(outs[rank.number], parts, between, strict=True):
            assert torch.equal(out, part), (part.shape, part.dtype)
            one.check(rank)


def runs_ahead(ranks: Ranks, seed: int, calls: int) -> None:
    """Many calls of changing sizes behind each other, to which ranks come late at random."""
    numbers = random.Random(seed)
    kinds = (None, torch.bfloat16, torch.float32)
    shapes = [(numbers.randrange(1, 80), 8 * numbers.randrange(1, 600)) for _ in range(calls)]
    cases = [
        case(ranks, shape, numbers.random() < 0.5, numbers.choice(kinds), seed + 100 + at)
        for at, shape in enumerate(shapes)
    ]
    late = [
        [numbers.randrange(CYCLES) if numbers.random() < 0.2 else 0 for _ in cases]
        for _ in range(ranks.world)
    ]

    def work(rank: Rank) -> Work:
        for one, cycles in zip(cases, late[rank.number], strict=True):
            if cycles:
                torch.cuda._sleep(cycles)
            one.launch(rank)
        yield

    ranks.do(work)
    for one in cases:
        for rank in ranks.mine:
            one.check(rank)


def replays(ranks: Ranks, seed: int, steps: int) -> None:
    """A graph of calls in one shot and two, with the norm and without, fed anew and replayed; other calls
    between its replays.
    """
    shape, world = (16, 4096), ranks.world
    recorded = {rank.number: record(rank, shape) for rank in ranks.mine}
    seen = {rank.number: poisoned(steps, 7, dtype=torch.float32) for rank in ranks.mine}
    between = [case(ranks, (5, 64), step % 2 == 0, None, seed + step) for step in range(3)]

    def work(rank: Rank) -> Work:
        at = rank.number
        for step in range(steps):
            recorded[at].x.fill_(step % 50 + at)
            recorded[at].graph.replay()
            seen[at][step].copy_(recorded[at].result)
            if step % 7 == 0:
                between[step % 3].launch(rank)
            if step % AT_ONCE == 0:
                yield
        yield

    ranks.do(work)
    kept, expected = 0.0, []
    for step in range(steps):
        total = world * (step % 50) + world * (world - 1) // 2
        kept = float(torch.tensor(kept + total).bfloat16())
        expected.append([total, total, kept, kept, step % 50, step % 50 + world - 1])
    for rank in ranks.mine:
        got = seen[rank.number].cpu()
        assert torch.equal(got[:, :6], torch.tensor(expected)), rank.number
        assert (got[1:, 6] > 0.98).all()
        for one in between[: (steps + 6) // 7]:
            one.check(rank)


@dataclass(frozen=True)
class Recorded:
    """A rank's graph: `result` is the least and the largest of all its sums, and of its residual stream, so
    that one wrong element shows, of all ranks' x, and the least of its norms.
    """

    graph: torch.cuda.CUDAGraph
    x: Tensor
    kept: list[Tensor]
    result: Tensor


def record(rank: Rank, shape: tuple[int, int]) -> Recorded:
    x, residual = (torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    weight = torch.ones(shape[1], dtype=torch.bfloat16, device=DEVICE)
    outs = [poisoned(*shape) for _ in range(4)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=rank.stream):
        for out, two_shots in zip(outs[:3], (False, True, False), strict=True):
            hopper.launch(rank.memory, x, None, None, 0.0, two_shots, out)
        hopper.launch(rank.memory, x, residual, weight, EPS, True, outs[3])
        every = hopper.launch_gather(rank.memory, x)
        sums = torch.stack(outs[:3]).float()
        found = [sums.amin(), sums.amax(), residual.amin(), residual.amax()]
        found += [every.amin(), every.amax(), outs[3].amin()]
        result = torch.stack([one.float() for one in found])
    return Recorded(graph, x, [residual, weight, *outs], result)


def public(ranks: Ranks, dtype: torch.dtype, shape: tuple[int, int], seed: int) -> None:
    """The ops that engines call: dtypes, sizes and layouts that the kernel isn't for go another way."""
    numbers = drawn(seed)
    parts = torch.randn(ranks.world, *shape, generator=numbers, device=DEVICE).to(dtype)
    residual = torch.randn(shape, generator=numbers, device=DEVICE).to(dtype)
    weight = torch.randn(shape[1], generator=numbers, device=DEVICE).to(dtype)
    total = added_up(parts)
    kept, normed = normed_sum(total, residual, weight)
    streams = [residual.clone() for _ in parts]
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def work(rank: Rank) -> Work:
        at = rank.number
        peers = Peers(lambda x: parts, rank.memory)
        summed = all_reduce(parts[at], peers)
        found[at] = summed, all_reduce_add_rms_norm(parts[at], streams[at], weight, EPS, peers)
        yield

    ranks.do(work)
    for rank in ranks.mine:
        summed, result = found[rank.number]
        assert torch.equal(summed, total), (dtype, shape)
        assert torch.equal(streams[rank.number], kept), (dtype, shape)
        torch.testing.assert_close(result.float(), normed, rtol=1.6e-2, atol=1.6e-2)


def everything(ranks: Ranks, seed: int, calls: int, steps: int) -> None:
    for dtype, shape in (
        (torch.float32, (7, 64)),
        (torch.float16, (7, 64)),
        (torch.bfloat16, (3, 12)),
        (torch.bfloat16, (CAPACITY // 2048 // 2 + 1, 2048)),
        (torch.bfloat16, (7, 64)),
    ):
        public(ranks, dtype, shape, seed)
    say("every dtype")
    sums(ranks, seed)
    say("sums of every size")
    gathers(ranks, seed)
    say("gathered")
    runs_ahead(ranks, seed, calls)
    say("ran ahead")
    replays(ranks, seed, steps)
    say("replayed")
    runs_ahead(ranks, seed + 1, calls)


def in_streams(count: int) -> Ranks:
    memories = side_by_side(count, DEVICE, PATIENCE_S)
    return Ranks(count, [Rank(memory, torch.cuda.Stream()) for memory in memories])


def streams(count: int, seed: int) -> None:
    # Kernels are loaded when they are first launched, and memory is found, which may wait for all that runs:
    # one rank goes first, with nobody to wait for.
    torch.cuda._sleep(1)
    everything(in_streams(1), seed, calls=40, steps=10)
    say("one rank alone")
    ranks = in_streams(count)
    for rank in ranks.mine:
        with torch.cuda.stream(rank.stream):
            for size in (1 << 18, 4 << 20, 64 << 20):
                torch.empty(size, dtype=torch.uint8, device=DEVICE)
    everything(ranks, seed, calls=40, steps=100)


def alone(count: int, told: bool) -> None:
    """A rank that waits in vain, until it is out of patience or told so."""
    memory = side_by_side(count, DEVICE, patience=1e4 if told else 0.5)[1]
    x = torch.ones(4, 64, dtype=torch.bfloat16, device=DEVICE)
    hopper.launch(memory, x, None, None, 0.0)
    if told:
        memory.abandon()
    with pytest.raises(RuntimeError, match="launch failure"):
        torch.cuda.synchronize()
    expected = {None} if told else {rank for rank in range(count) if rank != memory.rank}
    assert memory.missing() in expected
    say("missed rank", memory.missing())
    # The context is lost, and with it everything that the interpreter would free.
    os._exit(0)


def process(count: int, number: int, store: str, seed: int) -> None:
    global DEVICE
    DEVICE = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(DEVICE)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=count)

    def exchange(said: bytes) -> list[bytes]:
        heard: list[bytes] = [b""] * count
        distributed.all_gather_object(heard, said)
        return heard

    memory = mapped(number, count, DEVICE, exchange, PATIENCE_S)
    # Processes take turns on a GPU, so that a meeting may cost milliseconds.
    say("mapped")
    everything(Ranks(count, [Rank(memory, torch.cuda.Stream())]), seed, calls=20, steps=20)
    torch.cuda.synchronize()
    distributed.barrier()
    memory.close()
    distributed.destroy_process_group()


def main() -> None:
    faulthandler.enable()
    say("imported")
    # Others are compiled by whoever needs them, not by each rank of each test.
    cuda_build.Library._compile_others = lambda self, first: None  # type: ignore[method-assign]
    mode, count, *rest = sys.argv[1:]
    if mode == "streams":
        streams(int(count), int(rest[0]))
    elif mode == "alone":
        alone(int(count), told=rest == ["told"])
    else:
        process(int(count), int(rest[0]), rest[1], int(rest[2]))
    say(mode, count, "ok")


if __name__ == "__main__":
    main()
