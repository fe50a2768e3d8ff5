"""How busy the GPU is while an engine decodes: kernels a step, and the time in which nothing runs.

    python benchmarks/decode_gap.py benchmarks/shapes/qwen3-0.6b --json OUT.json

Steps are profiled through torch.profiler, which itself slows the host. Times are microseconds a step. Kernels
begin before the ones ahead have ended and wait inside: `us` is how long they were there, `later_us` how much
later the last end so far became through them, which adds up to the step.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest
from quickturn.sampling_params import SamplingParams


def short_name(kernel: str) -> str:
    """Its name with the arguments of its template; without namespaces and what it is called with."""
    for part in ("void ", "(anonymous namespace)::", "quickturn::", "decode_attention::"):
        kernel = kernel.replace(part, "")
    return kernel.partition("(quickturn")[0].partition("(CUtens")[0][:160]


def decode_profile(core: EngineCore, rows: int, context: int, steps: int, longest: int) -> dict[str, object]:
    """Profile `steps` decode steps of `rows` requests behind `context` tokens each; `longest`: see `main`."""
    random = np.random.default_rng(0)
    for index in range(rows):
        prompt = random.integers(0, core.ready().vocab_size, context, dtype=np.int32)
        sampling = SamplingParams(max_tokens=4096, temperature=0.0, ignore_eos=True)
        core.add(AddRequest(index + 1, prompt.tobytes(), sampling, time.monotonic()))
    while core.last_step.decode_rows < rows:
        core.step()
    for _ in range(16):
        core.step()
    started = time.perf_counter()
    for _ in range(steps):
        core.step()
    wall = (time.perf_counter() - started) / steps * 1e6
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if str(event.device_type).endswith("CUDA")
    )
    busy, idle, gaps, reached = 0.0, 0.0, [], spans[0][0]
    names, counts, later = Counter[str](), Counter[str](), Counter[str]()
    for start, end, name in ((start, end, short_name(kernel)) for start, end, kernel in spans):
        names[name] += end - start
        counts[name] += 1
        later[name] += max(0.0, end - reached)
        if start > reached:
            gaps.append(start - reached)
            idle += start - reached
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    long_gaps = sorted(gaps, reverse=True)[:steps]
    return {
        "rows": rows,
        "context": context,
        "steps": steps,
        "step_us_unprofiled": wall,
        "step_us": (busy + idle) / steps,
        "activities": len(spans) / steps,
        "idle_us": idle / steps,
        "idle_share": idle / (busy + idle),
        "idle_us_in_the_longest_gap_of_a_step": sum(long_gaps) / steps,
        "gap_share_of_unprofiled_step": sum(long_gaps) / steps / wall,
        "longest": {
            name: {"later_us": us / steps, "us": names[name] / steps, "launches": counts[name] / steps}
            for name, us in later.most_common(longest)
        },
    }


def main() -> None:
    """Start an engine, profile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--longest", type=int, default=8, help="list so many kernels, longest first")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    core = EngineCore(
        EngineConfig(
            model=chosen.model, load_format="dummy", dtype="bfloat16", max_requests=max(4, chosen.rows)
        )
    )
    result: dict[str, object] = {
        "command": f"python benchmarks/decode_gap.py {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    result |= decode_profile(core, chosen.rows, chosen.context, chosen.steps, chosen.longest)
    core.close()
    print(json.dumps(result, indent=1))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


main()
