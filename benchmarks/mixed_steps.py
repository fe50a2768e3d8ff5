"""What a step takes that mixes decoding rows with a piece of a prompt: recorded, or kernel by kernel.

    python benchmarks/mixed_steps.py benchmarks/shapes/qwen3-8b --json OUT.json

Each step is repeated as it is, two of them on their way at a time as in an engine; the wall clock counts.
Where no graph holds a step, both columns are launched kernel by kernel. Also said: what recording took, in
seconds and bytes, what decoding alone takes, and in how many rows both ways gave the same token (not where
the model has states, which each step moves on).
"""

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch

from quickturn.cache.layout import ArenaLayout
from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import LoadProgress
from quickturn.execution.batch import StateMoves, StepRows
from quickturn.execution.runner import BlockUpdate, PendingStep, Runner
from quickturn.sampling_params import SamplingParams

WARM_UP = 5


def take_blocks(layout: ArenaLayout, lengths: list[int]) -> tuple[list[BlockUpdate], list[StateMoves]]:
    """Blocks of its own for slot i with `lengths[i]` tokens, for every i and in every cache group."""
    updates, moves, slab = [], [], 0
    for laid in layout.groups:
        first, state = slab * laid.blocks_per_slab, laid.group.kind == "state"
        counts = [1 if state else -(-length // layout.block_tokens) for length in lengths]
        ids = np.arange(first, first + sum(counts), dtype=np.int32)
        slab += -(-len(ids) // laid.blocks_per_slab)
        if state:
            moves.append(StateMoves(ids, ids, np.zeros(len(ids), dtype=np.uint8)))
            ids = ids[:0]
        slots = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[: len(ids)]
        indexes = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])[: len(ids)]
        updates.append(BlockUpdate(slots, indexes, ids))
    if slab > layout.num_slabs:
        raise SystemExit(f"{slab} slabs wanted of {layout.num_slabs}: take fewer rows or shorter contexts")
    return updates, moves


def step_of(moves: list[StateMoves], context: int, decodes: int, behind: int, piece: int) -> StepRows:
    """Slots 1 to `decodes` decode behind `context` tokens; slot 0 brings `piece` tokens behind `behind`."""
    prompts = [0] if piece else []
    slots = np.array([*range(1, decodes + 1), *prompts], dtype=np.int32)
    lens = np.array([1] * decodes + [piece] * len(prompts), dtype=np.int32)
    contexts = np.array([context] * decodes + [behind] * len(prompts), dtype=np.int32)
    samples = np.array([1] * decodes + [0] * len(prompts), dtype=np.uint8)
    states = tuple(StateMoves(one.reads[slots], one.writes[slots], one.zero[slots]) for one in moves)
    return StepRows(slots, lens, contexts, samples, decodes, states)


def measure(runner: Runner, rows: StepRows, groups: int, steps: int) -> dict[str, object]:
    """Microseconds a step by the wall, which way steps went, and the tokens of the last one."""
    none = np.empty(0, dtype=np.int32)
    updates = [BlockUpdate(none, none, none)] * groups
    out: deque[PendingStep] = deque()
    runner.steps.clear()
    began, tokens = 0.0, none
    for index in range(WARM_UP + steps):
        if index == WARM_UP:
            torch.cuda.synchronize()
            began = time.perf_counter()
        out.append(runner.launch(rows, updates))
        if len(out) == 2:
            out.popleft().wait()
    while out:
        tokens = out.popleft().wait().tokens
    wall = (time.perf_counter() - began) / steps * 1e6
    return {"us": round(wall, 1), "path": next(iter(runner.steps)), "tokens": tokens.tolist()}


def main() -> None:
    """Start an engine, time the steps, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--context", type=int, default=8192, help="of the decoding rows")
    parser.add_argument("--behind", type=int, default=8192, help="tokens of the prompt ahead of the piece")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    most = max(chosen.rows)
    longest = max(chosen.context, chosen.behind + max(chosen.tokens)) + 1
    stages: list[tuple[str, float]] = []

    def progress(report: LoadProgress) -> None:
        stages.append((report.stage, time.perf_counter()))

    config = EngineConfig(
        chosen.model,
        load_format="dummy",
        dtype="bfloat16",
        max_requests=most + 1,
        max_context=longest,
        max_step_tokens=2048,
    )
    core = EngineCore(config, progress)
    runner, layout = core._runner, core._started.layout
    recording = [at for stage, at in stages if stage == "recording graphs"]
    result: dict[str, object] = {
        "command": f"python benchmarks/mixed_steps.py {' '.join(sys.argv[1:])}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "recording_s": round(recording[-1] - recording[0], 2),
        "facts": dict(core.ready().facts),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "free_bytes": torch.cuda.mem_get_info()[0],
        "context": chosen.context,
        "behind": chosen.behind,
    }
    print(json.dumps(result, indent=1), flush=True)
    updates, moves = take_blocks(layout, [longest] * (most + 1))
    random = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for slot in range(most + 1):
        tokens = random.integers(0, core.ready().vocab_size, longest, dtype=np.int32)
        runner.admit(slot, tokens, longest, sampling, 0)
    for group, update in enumerate(updates):
        runner._batch.update_tables(group, update.slots, update.indexes, update.blocks)
    graphs, cells = runner._graphs, []
    for decodes in chosen.rows:
        for tokens in [decodes, *(n for n in chosen.tokens if n - decodes >= 8)]:
            rows = step_of(moves, chosen.context, decodes, chosen.behind, tokens - decodes)
            runner._graphs = None
            eager = measure(runner, rows, len(layout.groups), chosen.steps)
            runner._graphs = graphs
            recorded = measure(runner, rows, len(layout.groups), chosen.steps)
            pairs = zip(eager.pop("tokens"), recorded.pop("tokens"), strict=True)  # type: ignore[call-overload]
            cell: dict[str, object] = {"rows": decodes, "prompt": tokens - decodes}
            if not moves:
                cell["same_tokens"] = sum(a == b for a, b in pairs)
            cell |= {"recorded_us": recorded["us"], "path": recorded["path"], "kernels_us": eager["us"]}
            cells.append(cell)
            print(json.dumps(cell), flush=True)
    result["steps"] = cells
    core.close()
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(result, indent=1) + "\n")


main()
