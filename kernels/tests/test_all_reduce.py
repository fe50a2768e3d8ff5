"""All-reduce: what it means, how blocks of several ranks meet, and on a GPU the kernel itself."""

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from quickturn_kernels import Peers, add_rms_norm, all_gather, all_reduce, all_reduce_add_rms_norm, cuda_build
from quickturn_kernels.ops.all_reduce.peer_memory import mapped


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
    assert torch.equal(all_gather(parts[1], peers), parts)


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


class Driver:
    """One rank's CUDA calls, of which one fails: they say so by their number."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.open = 0

    def quickturn_peer_bytes(self, capacity: object, area: object, counters: object) -> int:
        if self.failing == "compile":
            raise cuda_build.CompileError("no compiler")
        return 0

    def quickturn_peer_make(self, size: object, area: Any, handle: Any) -> int:
        if self.failing == "make":
            return 2
        area._obj.value, handle.raw = 4096, b"h" * len(handle.raw)
        self.open += 1
        return 0

    def quickturn_peer_open(self, handle: bytes, area: Any) -> int:
        if self.failing == "open":
            return 201
        area._obj.value = 8192
        self.open += 1
        return 0

    def quickturn_peer_close(self, area: object, mapped: int) -> int:
        self.open -= 1
        return 0


@pytest.mark.parametrize("failing", ["compile", "make", "open"])
def test_a_rank_that_cant_map_memory_keeps_all_from_it(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them raise, and none keeps anything, wherever it went wrong on one of them."""
    drivers = [Driver(failing if rank == 1 else "") for rank in range(3)]
    mine = threading.local()
    monkeypatch.setattr(cuda_build, "library", lambda capability: mine.driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    heard: list[list[bytes]] = [[b""] * 3, [b""] * 3]
    meeting = threading.Barrier(3)

    def rank(number: int) -> str:
        mine.driver = drivers[number]
        rounds = iter(heard)

        def exchange(said: bytes) -> list[bytes]:
            together = next(rounds)
            together[number] = said
            meeting.wait(60)
            return together

        with pytest.raises(RuntimeError, match="can't map the others' memory") as found:
            mapped(number, 3, torch.device("cpu"), exchange)
        return str(found.value)

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(rank, range(3)))
    assert said[1].startswith("ranks [1")
    assert [driver.open for driver in drivers] == [0, 0, 0]


CARD = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and cuda_build.compiler()
needs_hopper = pytest.mark.skipif(not CARD, reason="needs a Hopper GPU and nvcc")
CHILD = Path(__file__).with_name("all_reduce_ranks.py")
LIMIT_S = 60.0


def run_to_end(commands: list[list[str]], more: Mapping[str, str] = MappingProxyType({})) -> None:
    """Runs children side by side, which share the GPU. One that fails or hangs ends all of them."""
    for name in ("all_reduce", "norm"):
        cuda_build.build(cuda_build.source_directory() / f"{name}.cu", (9, 0))
    # Streams of one process that share a queue of the GPU would wait for each other.
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "TRITON_INTERPRET": "0", **more}
    with tempfile.TemporaryFile() as said:
        children = [
            subprocess.Popen(
                [sys.executable, str(CHILD), *words], stdout=said, stderr=subprocess.STDOUT, env=environment
            )
            for words in commands
        ]
        deadline = time.monotonic() + LIMIT_S
        try:
            for child in children:
                child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            codes = [child.poll() for child in children]
            for child in children:
                child.kill()
                child.wait()
        said.seek(0)
        text = said.read().decode()
    print(text)
    assert codes == [0] * len(children), (
        f"exit statuses {codes} (None: hung for {LIMIT_S:g} s)\n{text[-4000:]}"
    )


@needs_hopper
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_as_streams_of_one_gpu(ranks: int, seed: int) -> None:
    run_to_end([["streams", str(ranks), str(seed)]])


@needs_hopper
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_as_processes_of_one_gpu(ranks: int, seed: int, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    run_to_end([["process", str(ranks), str(rank), store, str(seed)] for rank in range(ranks)], environment)


@needs_hopper
@pytest.mark.parametrize("told", [[], ["told"]], ids=["patience", "told"])
def test_a_rank_that_never_comes_ends_the_kernel(told: list[str]) -> None:
    run_to_end([["alone", "3", *told]])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_of_one_host(tmp_path: Path, seed: int) -> None:
    ranks, store = min(torch.cuda.device_count(), 8), str(tmp_path / "store")
    run_to_end([["process", str(ranks), str(rank), store, str(seed)] for rank in range(ranks)])
