"""All-reduce with the norm behind it on GPUs of one host, by message size: our kernel in one shot and in two,
and NCCL with our norm.

    python benchmarks/all_reduce.py --ranks 2 --hidden 4096 --json all_reduce.json
    python benchmarks/all_reduce.py --one-gpu --ranks 2 --hidden 2048

Times are medians of replayed CUDA graphs of `REPEATS` calls each, in microseconds a call. With `--one-gpu`
the ranks are streams of one GPU: what a call costs where flags and rows cross no link, and all ranks share
one memory; beside it the norm alone, which is what one rank would do.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing
from quickturn_kernels import add_rms_norm
from quickturn_kernels.ops.all_reduce import hopper
from quickturn_kernels.ops.all_reduce.peer_memory import mapped, side_by_side

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 20
REPLAYS = 30


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    times = []
    for _ in range(REPLAYS):
        distributed.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return median(times[5:])


def measure(rank: int, ranks: int, hidden: int, store: str, result: str) -> None:
    """One rank's part; rank 0 writes the figures."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks, device_id=device
    )

    def exchange(said: bytes) -> list[bytes]:
        heard: list[bytes] = [b""] * ranks
        distributed.all_gather_object(heard, said)
        return heard

    memory = mapped(rank, ranks, device, exchange)
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device=device).bfloat16()
        stream = torch.zeros_like(x)
        if not memory.takes(x):
            continue

        def by_nccl(x: torch.Tensor = x, stream: torch.Tensor = stream) -> None:
            distributed.all_reduce(x)
            add_rms_norm(x, stream, weight, 1e-6)

        def ours(two_shots: bool, x: torch.Tensor = x, stream: torch.Tensor = stream) -> None:
            hopper.launch(memory, x, stream, weight, 1e-6, two_shots)

        rows.append(
            {
                "tokens": tokens,
                "bytes": x.numel() * 2,
                "one_shot_us": timed(lambda: ours(False)),
                "two_shots_us": timed(lambda: ours(True)),
                "nccl_us": timed(by_nccl),
            }
        )
        if rank == 0:
            print("  ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()), flush=True)
    if rank == 0:
        machine = {"gpu": torch.cuda.get_device_name(0), "ranks": ranks, "hidden": hidden}
        Path(result).write_text(json.dumps(machine | {"rows": rows}, indent=1) + "\n")
    torch.cuda.synchronize()
    distributed.barrier()
    memory.close()
    distributed.destroy_process_group()


def measure_streams(ranks: int, hidden: int) -> list[dict[str, Any]]:
    """All ranks as streams of one GPU."""
    device = torch.device("cuda", 0)
    memories = [side_by_side(1, device), side_by_side(ranks, device, patience=10.0)]
    streams = [torch.cuda.Stream(device) for _ in range(ranks)]
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    found: list[dict[str, Any]] = []
    for tokens in TOKENS:
        xs = [torch.randn(tokens, hidden, device=device).bfloat16() for _ in range(ranks)]
        kept = [torch.zeros_like(x) for x in xs]
        if not memories[1][0].takes(xs[0]):
            continue

        def norm(rank: int, xs: list[torch.Tensor] = xs, kept: list[torch.Tensor] = kept) -> None:
            add_rms_norm(xs[rank], kept[rank], weight, 1e-6)

        def ours(
            rank: int,
            two_shots: bool,
            of: int,
            xs: list[torch.Tensor] = xs,
            kept: list[torch.Tensor] = kept,
        ) -> None:
            hopper.launch(memories[of][rank], xs[rank], kept[rank], weight, 1e-6, two_shots)

        # A kernel is loaded by its first launch, which may wait for those that run: alone at first.
        for two_shots in (False, True):
            ours(0, two_shots, 0)
        norm(0)
        found.append(
            {
                "tokens": tokens,
                "bytes": xs[0].numel() * 2,
                "one_shot_us": timed_together(lambda rank: ours(rank, False, 1), streams),
                "two_shots_us": timed_together(lambda rank: ours(rank, True, 1), streams),
                "norm_us": timed_together(norm, streams[:1]),
            }
        )
        print("  ".join(f"{name} {value:.4g}" for name, value in found[-1].items()), flush=True)
    return found


def timed_together(call: Callable[[int], object], streams: list[torch.cuda.Stream]) -> float:
    """Microseconds of one call of all ranks, which wait for each other in it."""
    graphs = []
    for rank, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                call(rank)
        graphs.append(graph)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for rank, (graph, stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                # The first replay waits until the host has launched all of them.
                graph.replay()
                if rank == 0:
                    begin.record()
                graph.replay()
                if rank == 0:
                    end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / REPEATS)
    return median(times[5:])


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--json", default="all_reduce.json", help="where the figures go")
    parser.add_argument("--one-gpu", action="store_true", help="ranks as streams of one GPU")
    given = parser.parse_args()
    if given.one_gpu:
        # Streams that share a queue of the GPU would wait for each other.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        rows = measure_streams(given.ranks, given.hidden)
        machine = {"gpu": torch.cuda.get_device_name(0), "ranks": given.ranks, "hidden": given.hidden}
        Path(given.json).write_text(json.dumps(machine | {"one_gpu": True, "rows": rows}, indent=1) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, given.hidden, str(Path(folder) / "store"), given.json)
        torch.multiprocessing.spawn(measure, arguments, given.ranks)


if __name__ == "__main__":
    main()
