"""All-reduce: what it means, how blocks of several ranks meet, and on two GPUs the kernel itself."""

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

from quickturn_kernels import Peers, add_rms_norm, all_reduce, all_reduce_add_rms_norm
from quickturn_kernels.ops.all_reduce import PeerMemory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_rounded_once_and_in_order(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(3, 5, 24, generator=generator).to(dtype)
    residual = torch.randn(5, 24, generator=generator).to(dtype)
    weight = torch.randn(24, generator=generator).to(dtype)
    peers = Peers(lambda x: parts)
    total = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    assert torch.equal(all_reduce(parts[1], peers), total)
    stream = residual.clone()
    normed = add_rms_norm(total, stream, weight, 1e-6)
    assert torch.equal(all_reduce_add_rms_norm(parts[1], residual, weight, 1e-6, peers), normed)
    assert torch.equal(residual, stream)


@dataclass
class Area:
    """What a rank's GPU shows the others, as in `all_reduce.cu`: flags by block and rank, two slots of two
    halves."""

    flags: dict[tuple[int, int], int] = field(default_factory=dict)
    halves: dict[tuple[int, int, int], int] = field(default_factory=dict)


BLOCKS = 3


def block(
    areas: list[Area], rank: int, number: int, calls: list[tuple[list[list[int]], bool]], out: list[list[int]]
) -> Generator[bool, None, None]:
    """One block of one rank over all calls, step by step; it gives way where the GPU might, and says when a
    call has ended.
    """
    ranks, meetings = len(areas), 0

    def meet() -> Generator[bool, None, None]:
        for other in range(ranks):
            areas[other].flags[number, rank] = meetings
            yield False
        while any(areas[rank].flags.get((number, other), 0) < meetings for other in range(ranks)):
            yield False

    for call, (inputs, two_shots) in enumerate(calls):
        mine = range(number, len(inputs[rank]), BLOCKS)
        slot = call & 1
        for row in mine:
            areas[rank].halves[slot, 0, row] = inputs[rank][row]
            yield False
        meetings += 1
        yield from meet()
        if two_shots:
            for row in mine:
                if row // BLOCKS % ranks == rank:
                    total = 0
                    for area in areas:
                        total += area.halves[slot, 0, row]
                        yield False
                    areas[rank].halves[slot, 1, row] = total
            meetings += 1
            yield from meet()
        for row in mine:
            if two_shots:
                out[call][row] = areas[row // BLOCKS % ranks].halves[slot, 1, row]
            else:
                out[call][row] = 0
                for area in areas:
                    out[call][row] += area.halves[slot, 0, row]
                    yield False
        yield True


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_meet_in_any_order_of_time(ranks: int, seed: int) -> None:
    """Calls of all sizes, in one shot and two, with ranks and blocks that run ahead as far as they can. A
    kernel begins when all blocks of the one before have ended, as in a stream.
    """
    numbers = random.Random(seed)
    for _ in range(20):
        calls = [
            ([[numbers.randrange(1000) for _ in range(rows)] for _ in range(ranks)], numbers.random() < 0.5)
            for rows in (numbers.randrange(0, 3 * BLOCKS) for _ in range(6))
        ]
        areas = [Area() for _ in range(ranks)]
        outs = [[[-1] * len(inputs[0]) for inputs, _ in calls] for _ in range(ranks)]
        runs = {
            (rank, number): block(areas, rank, number, calls, outs[rank])
            for rank in range(ranks)
            for number in range(BLOCKS)
        }
        done = dict.fromkeys(runs, 0)
        finished: set[tuple[int, int]] = set()
        favoured = numbers.choice(list(runs))
        for _ in range(200_000):
            if len(finished) == len(runs):
                break
            key = favoured if numbers.random() < 0.5 else numbers.choice(list(runs))
            if key in finished or any(done[key[0], other] < done[key] for other in range(BLOCKS)):
                favoured = numbers.choice(list(runs))
                continue
            done[key] += next(runs[key])
            if done[key] == len(calls):
                finished.add(key)
        assert len(finished) == len(runs), "the blocks wait for each other"
        for out in outs:
            for (inputs, _), got in zip(calls, out, strict=True):
                assert got == [sum(row) for row in zip(*inputs, strict=True)]


def on_a_gpu(rank: int, ranks: int, store: str) -> None:
    """Both shots, with and without the norm, fed anew by a replayed graph."""
    from quickturn_kernels.ops.all_reduce import hopper

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

    def exchange(said: bytes) -> list[bytes]:
        heard: list[bytes] = [b""] * ranks
        distributed.all_gather_object(heard, said)
        return heard

    memory = PeerMemory(rank, ranks, device, exchange)
    for rows, width in ((1, 2048), (3, 4096), (64, 5120), (33, 8), (200, 16384), (512, 4096)):
        for two_shots in (False, True):
            for wide in (False, True):
                numbers = torch.Generator().manual_seed(rows * width + 2 * wide + two_shots)
                parts = torch.randn(ranks, rows, width, generator=numbers).bfloat16()
                stream = torch.randn(rows, width, generator=numbers).bfloat16().to(device)
                weight = torch.randn(width, generator=numbers).to(device)
                weight = weight if wide else weight.bfloat16()
                total = torch.zeros(rows, width)
                for part in parts:
                    total += part.float()
                summed = total.bfloat16().to(device)
                x = parts[rank].to(device)
                for _ in range(3):
                    got = hopper.launch(memory, x, None, None, 0.0, two_shots)
                    assert torch.equal(got, summed), (rows, width, two_shots)
                kept = stream.clone()
                want = add_rms_norm(summed, kept, weight, 1e-6)
                got = hopper.launch(memory, x, stream, weight, 1e-6, two_shots)
                torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)
                assert torch.equal(stream, kept), (rows, width, two_shots)
    x = torch.zeros(16, 4096, dtype=torch.bfloat16, device=device)
    graph = torch.cuda.CUDAGraph()
    hopper.launch(memory, x, None, None, 0.0)
    with torch.cuda.graph(graph):
        out = [hopper.launch(memory, x, None, None, 0.0, two_shots) for two_shots in (False, True, False)]
    for step in range(100):
        x.fill_(step + rank)
        graph.replay()
        for got in out:
            assert (got == ranks * step + ranks * (ranks - 1) // 2).all()
    torch.cuda.synchronize()
    distributed.barrier()
    memory.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_of_one_host(tmp_path: Path) -> None:
    ranks = min(torch.cuda.device_count(), 8)
    multiprocessing.spawn(on_a_gpu, (ranks, str(tmp_path / "store")), ranks)
