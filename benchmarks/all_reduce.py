"""All-reduce with the norm behind it on GPUs of one host, by message size: our kernel in one shot and in two,
and NCCL with our norm.

    python benchmarks/all_reduce.py --ranks 2 --hidden 4096 --json all_reduce.json

Times are medians of replayed CUDA graphs of `REPEATS` calls each, in microseconds a call.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as distributed
import torch.multiprocessing
from quickturn_kernels import PeerMemory, add_rms_norm
from quickturn_kernels.ops.all_reduce import hopper

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

    memory = PeerMemory(rank, ranks, device, exchange)
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


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--json", default="all_reduce.json", help="where the figures go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (given.ranks, given.hidden, str(Path(folder) / "store"), given.json)
        torch.multiprocessing.spawn(measure, arguments, given.ranks)


if __name__ == "__main__":
    main()
