"""Speed of the control plane, one thread, measured from Python as the runtime sees it.

    python benchmarks/control_plane.py --json benchmarks/results/control_plane.json

Times are microseconds unless named otherwise. Contexts are reached by prefilling them, as plans: nothing
computes tokens.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import quickturn_control as qc
from numpy.typing import NDArray

UNIT = 64
Figures = dict[str, float]


def scheduler(blocks: int, **options: object) -> qc.Scheduler:
    """A scheduler for one full group, 16 blocks a slab."""
    settings: dict[str, object] = {"max_requests": 2048, "max_step_tokens": 1 << 26, "pipeline_depth": 1}
    settings.update(options)
    return qc.Scheduler(
        qc.SchedulerConfig(groups=[qc.GroupConfig("full", 16)], num_slabs=-(-blocks // 16), **settings)
    )  # type: ignore[arg-type]


def prompt(tokens: int, seed: int) -> NDArray[np.int32]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 1 << 17, tokens, dtype=np.int32)


def step(target: qc.Scheduler, now: float) -> tuple[float, float, qc.StepPlan]:
    """One plan and its apply; the time of each."""
    start = time.perf_counter()
    plan = target.plan(now)
    planned = time.perf_counter()
    assert plan is not None
    assert plan.num_rows
    result = qc.StepResult(plan.step, np.full(plan.num_samples, 7, np.int32))
    before = time.perf_counter()
    target.apply(result)
    return (planned - start) * 1e6, (time.perf_counter() - before) * 1e6, plan


def decode_step(batch: int, context: int, steps: int, waiting: int = 0) -> Figures:
    """Steady decoding of `batch` requests; `waiting` prompts of 64k tokens find no room."""
    blocks = batch * (context // UNIT + steps // UNIT + 2)
    target = scheduler(blocks)
    for i in range(batch):
        length = context - UNIT // 2 + i % UNIT
        target.add(qc.Request(i, prompt(length, i), max_tokens=steps + 200))
    step(target, 0.0)
    for i in range(waiting):
        target.add(qc.Request(batch + i, prompt(65536, batch + i), max_tokens=16, arrival=0.0))
    both, plans, applies = [], [], []
    for i in range(steps):
        planned, applied, plan = step(target, 1.0 + 0.01 * i)
        assert plan.num_rows == batch
        both.append(planned + applied)
        plans.append(planned)
        applies.append(applied)
    return {
        "median": round(statistics.median(both), 2),
        "p99": round(sorted(both)[int(0.99 * len(both))], 2),
        "plan_median": round(statistics.median(plans), 2),
        "apply_median": round(statistics.median(applies), 2),
    }


def fill(target: qc.Scheduler, blocks: int, chain: int) -> None:
    """Fill the pool with cached chains of `chain` blocks that nobody uses."""
    number = 0
    for start in range(0, blocks, chain * 256):
        for _ in range(min(256, (blocks - start) // chain)):
            number += 1
            target.add(
                qc.Request(number, prompt(chain * UNIT + 1, number), max_tokens=1, arrival=float(number))
            )
        step(target, float(number))


def allocation(blocks: int, chain: int) -> Figures:
    """A block from a pool full of cached ones, its eviction included: planning a prefill of 4,096 tokens."""
    target = scheduler(blocks)
    fill(target, blocks, chain)
    before = target.stats()
    times = []
    for i in range(64):
        target.add(qc.Request(10**7 + i, prompt(4096, 10**7 + i), max_tokens=1, arrival=1e9 + i))
        planned, _, _ = step(target, 1e6 + i)
        times.append(planned / 64)
    after = target.stats()
    evicted = after["evictions"] - before["evictions"]
    assert evicted >= 64 * 64 * 0.9, evicted
    return {
        "median": round(statistics.median(times), 3),
        "worst": round(max(times), 3),
        "index_bytes_per_block": round(before["index_bytes"] / before["index_nodes"], 1),
    }


def matching(tokens: int) -> dict[str, float]:
    """A prompt of a million tokens, cold and when it extends a known one by 1,000: milliseconds."""
    target = scheduler(2 * tokens // UNIT)
    known = prompt(tokens, 1)
    longer = np.concatenate([known, prompt(1000, 2)])

    def timed(action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return round((time.perf_counter() - start) * 1e3, 3)

    figures = {
        "match_nothing_known_ms": timed(lambda: target.match(known)),
        "add_cold_ms": timed(lambda: target.add(qc.Request(1, known, max_tokens=4))),
    }
    for _ in range(4):
        step(target, 0.0)
    request = qc.Request(2, longer, max_tokens=4)
    figures["match_known_ms"] = min(timed(lambda: target.match(longer)) for _ in range(5))
    figures["add_extending_ms"] = timed(lambda: target.add(request))
    start = time.perf_counter()
    plan = target.plan(1.0)
    figures["plan_admitting_ms"] = round((time.perf_counter() - start) * 1e3, 3)
    assert plan is not None
    assert plan.admitted.cached_tokens[0] == tokens
    return figures


def measurements() -> Iterator[tuple[str, object]]:
    """All of them, in the order of the table."""
    for batch, context in (
        (64, 1024),
        (256, 1024),
        (256, 32768),
        (256, 131072),
        (1024, 1024),
        (1024, 8192),
        (1024, 32768),
    ):
        yield f"decode, {batch} requests at {context} tokens, us a step", decode_step(batch, context, 400)
    yield "decode, 256 requests at 1024 tokens, nothing waiting, us a step", decode_step(256, 1024, 128)
    yield (
        "decode, 256 requests at 1024 tokens, 32 blocked prompts of 64k, us a step",
        decode_step(256, 1024, 128, waiting=32),
    )
    for blocks in (10_000, 100_000, 400_000):
        yield (
            f"allocation with eviction, {blocks} cached blocks in chains of 500, us a block",
            allocation(blocks, 500),
        )
    yield "allocation with eviction, 400000 cached blocks in chains of 1, us a block", allocation(400_000, 1)
    yield "a prompt of 1,000,000 tokens", matching(1_000_000 // UNIT * UNIT)


def machine() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    result: dict[str, object] = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "build": qc.build_info(),
        "figures": {},
    }
    figures: dict[str, object] = result["figures"]  # type: ignore[assignment]
    for name, figure in measurements():
        figures[name] = figure
        print(f"{name}: {figure}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
