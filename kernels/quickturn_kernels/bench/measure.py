"""Timing, and the roofs that times are held against."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GRAPH_SECONDS = 0.2
CPU_SECONDS = 0.2
MIN_REPEATS = 5
MAX_REPEATS = 200

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True)
class Roof:
    """What the device reaches, measured: bytes/s that a large copy reads and writes, FLOP/s of a large
    matrix product.
    """

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, moved: int, flops: int) -> float:
        """The least time that so many bytes and FLOPs can take."""
        return max(moved / self.bytes_per_second, flops / self.flops_per_second)


def measure(calls: Calls, device: torch.device, *, capture: bool = True) -> float:
    """Median seconds of one call. `calls` are the same work on different memory, taken in turn, so that no
    cache stays warm.

    CUDA: all calls captured in one graph, replays timed with events (without capture: launched one by one,
    events around all). Other devices: perf_counter around each call.
    """
    if device.type != "cuda":
        return _measure_on_host(calls)
    for call in calls[:2]:
        call()
    torch.cuda.synchronize(device)
    run = _captured(calls, device) if capture else _one_by_one(calls)
    run()
    torch.cuda.synchronize(device)
    spent, times = 0.0, list[float]()
    while len(times) < MIN_REPEATS or (spent < GRAPH_SECONDS and len(times) < MAX_REPEATS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        torch.cuda.synchronize(device)
        seconds = float(start.elapsed_time(end)) / 1e3
        spent += seconds
        times.append(seconds / len(calls))
    return statistics.median(times)


def roof(device: torch.device, dtype: torch.dtype) -> Roof:
    """Measure the device's roofs for this dtype."""
    on_gpu = device.type == "cuda"
    size = (1 << 30) if on_gpu else (1 << 26)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = measure([lambda: target.copy_(source)], device)
    side = 8192 if on_gpu else 1024
    left = torch.randn(side, side, device=device).to(dtype)
    right = torch.randn(side, side, device=device).to(dtype)
    multiplying = measure([lambda: left @ right], device)
    return Roof(2 * size / copying, 2 * side**3 / multiplying)


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache, or a generous guess."""
    if device.type == "cuda":
        return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    return 32 << 20


def _measure_on_host(calls: Calls) -> float:
    for call in calls[:2]:
        call()
    spent, times = 0.0, list[float]()
    while len(times) < MIN_REPEATS or (spent < CPU_SECONDS and len(times) < MAX_REPEATS):
        start = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(time.perf_counter() - start)
        spent += times[-1]
    return statistics.median(times)


def _captured(calls: Calls, device: torch.device) -> Callable[[], None]:
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize(device)
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph.replay


def _one_by_one(calls: Calls) -> Callable[[], None]:
    def run() -> None:
        for call in calls:
            call()

    return run
