"""`python -m quickturn_kernels.bench`: measure every op on this machine."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quickturn_kernels import platform, registry
from quickturn_kernels.__main__ import DTYPES
from quickturn_kernels.bench.measure import Roof, cache_bytes, measure, roof
from quickturn_kernels.bench.problem import Problem
from quickturn_kernels.bench.problems import problems
from quickturn_kernels.registry import Signature

MAX_COPIES = 16
MAX_INPUT_SHARE = 8
"""Copies of the inputs take at most this part of the memory: one in ..."""


@dataclass(frozen=True)
class Line:
    """One measurement. percent: of the roof that binds, memory or compute."""

    op: str
    implementation: str
    shape: str
    microseconds: float
    moved_bytes: int
    flops: int
    gigabytes_per_second: float
    teraflops: float
    bound: str
    percent_of_roof: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m quickturn_kernels.bench",
        description="Time, bytes, FLOPs and percent of the measured roof, op by op, at the shapes of models.",
        epilog="example: python -m quickturn_kernels.bench --op paged_attention_decode --json decode.json",
    )
    parser.add_argument("--op", action="append", help="only this op (may be repeated)")
    parser.add_argument("--shape", default="", help="only shapes that contain this text")
    parser.add_argument("--implementation", default="", help="this one, or 'all' that fit; else the chosen")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--device", help="torch device, by default the best of this machine")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    chosen = parser.parse_args(arguments)
    device, dtype = torch.device(chosen.device or platform.current().device), DTYPES[chosen.dtype]
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    machine = platform.describe(device)
    found = roof(device, dtype)
    ceilings = f"{found.bytes_per_second / 1e9:.0f} GB/s, {found.flops_per_second / 1e12:.1f} TFLOP/s"
    print(f"{machine.name}, {chosen.dtype}, torch {torch.__version__}; roof {ceilings}")
    lines = []
    for problem in problems(device, dtype):
        if (chosen.op and problem.op not in chosen.op) or chosen.shape not in problem.shape:
            continue
        for name in _implementations(problem, chosen.implementation, device, dtype):
            line = run(problem, name, device, found)
            lines.append(line)
            print(
                f"{line.op:<24} {line.implementation:<10} {line.shape:<44} {line.microseconds:>10.1f} us"
                f" {line.gigabytes_per_second:>8.0f} GB/s {line.teraflops:>8.2f} TFLOP/s"
                f" {line.percent_of_roof:>6.1f}% of {line.bound}",
                flush=True,
            )
    if chosen.json:
        report = {
            "machine": machine.name,
            "torch": torch.__version__,
            "dtype": chosen.dtype,
            "roof": asdict(found),
            "results": [asdict(line) for line in lines],
        }
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def run(problem: Problem, implementation: str, device: torch.device, ceiling: Roof) -> Line:
    """Measure one problem with one implementation."""
    with registry.use(**_overrides(problem, implementation)):
        first = problem.build()
        # Enough copies of the inputs that none is still in the cache when its turn comes again.
        room = platform.describe(device).memory // MAX_INPUT_SHARE
        wanted = 2 * cache_bytes(device) // max(1, problem.moved) + 1
        copies = max(1, min(MAX_COPIES, wanted, room // max(1, problem.moved)))
        calls = [first, *(problem.build() for _ in range(copies - 1))]
        seconds = measure(calls, device, capture=implementation != "reference")
    memory, compute = problem.moved / ceiling.bytes_per_second, problem.flops / ceiling.flops_per_second
    return Line(
        op=problem.op,
        implementation=implementation,
        shape=problem.shape,
        microseconds=round(seconds * 1e6, 2),
        moved_bytes=problem.moved,
        flops=problem.flops,
        gigabytes_per_second=round(problem.moved / seconds / 1e9, 1),
        teraflops=round(problem.flops / seconds / 1e12, 3),
        bound="memory" if memory >= compute else "compute",
        percent_of_roof=round(100 * ceiling.seconds(problem.moved, problem.flops) / seconds, 1),
    )


def _overrides(problem: Problem, implementation: str) -> dict[str, str]:
    """The op's implementation; a weight for `linear` is laid out by the implementation that will read it."""
    names = {problem.op: implementation}
    if problem.op == "linear":
        known = {one.name for one in registry.implementations("prepare_linear")}
        names["prepare_linear"] = implementation if implementation in known else "reference"
    return names


def _implementations(
    problem: Problem, wanted: str, device: torch.device, dtype: torch.dtype
) -> Iterator[str]:
    signature = Signature(device, dtype)
    if wanted == "all":
        machine = platform.describe(device)
        for one in registry.implementations(problem.op):
            if one.fits(signature) and one.platform.met_by(machine):
                yield one.name
    else:
        yield wanted or registry.select(problem.op, signature).name


if __name__ == "__main__":
    sys.exit(main())
