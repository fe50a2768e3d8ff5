"""Agent sessions on one GPU, engine alone: tokens/s of a user against tokens/s of the GPU.

    python benchmarks/agent_h200.py --output benchmarks/results/agent_h200

EvalScope's SWE-smith shape (a first turn of 50,000 tokens, 800 new ones a turn, answers of 500) at 1 to 32
users on the Qwen3.5-35B-A3B shape with random weights, under a promise of 70 tokens/s for each user. Needs
torch, numpy and transformers only: prompts are token ids, straight into the engine loop; no HTTP is in the
figures.

One engine runs all cells, each with sessions that share nothing with those before. A cell is a file, written
when it is over; what is there already isn't run again. `--budget` bounds the whole command in seconds: the
time that is left is shared out over the cells that are left; turns that would begin later are counted as left
out.
"""

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from quickturn.bench.agent import report  # noqa: E402
from quickturn.bench.agent.engine import hold_on  # noqa: E402
from quickturn.bench.agent.load import Load  # noqa: E402
from quickturn.bench.agent.page import write_page  # noqa: E402
from quickturn.bench.agent.run import Pace  # noqa: E402
from quickturn.bench.agent.sweep import Cell, finished  # noqa: E402
from quickturn.bench.agent.synthetic import Shape  # noqa: E402
from quickturn.config import EngineConfig  # noqa: E402
from quickturn.engine.core import EngineCore  # noqa: E402
from quickturn.engine.messages import LoadProgress  # noqa: E402

ENDS_S = 20.0
"""Left of the budget for turns that are out when a cell's time is over, and for the page."""


def arguments(words: list[str]) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(HERE / "shapes" / "qwen3.5-35b-a3b"))
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory", type=int, help="bytes of the cache; default: from the machine")
    parser.add_argument("--max-step-tokens", type=int, default=8192)
    parser.add_argument("--min-tps-per-user", type=float, default=70.0)
    parser.add_argument("--max-pause", type=float, default=0.0, help="seconds; see serve")
    parser.add_argument("--pause-every", type=int, default=128, help="steps; see serve")
    # First what says most, should the time not suffice for all.
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32, 16, 4, 2])
    parser.add_argument("--first", type=int, default=50_000)
    parser.add_argument("--grow", type=int, default=800)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--answer", type=int, default=500)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in all, the start included")
    parser.add_argument("--label", default="quickturn, engine alone")
    parser.add_argument("--output", type=Path, default=Path("agent_h200"), help="folder for the results")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    """Run the cells that aren't there; write the page after each."""
    began = time.monotonic()
    options = arguments(words)
    shape = Shape(options.first, options.grow, (options.turns, options.turns), options.answer)
    config = EngineConfig(
        options.model,
        load_format=options.load_format,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        memory=options.memory,
        max_step_tokens=options.max_step_tokens,
        max_requests=max(options.concurrency),
        max_context=shape.first + options.turns * (shape.grow + shape.answer) + 64,
        min_tps_per_user=options.min_tps_per_user,
        max_pause=options.max_pause,
        pause_every=options.pause_every,
    )
    cells = [Cell(users, options.min_tps_per_user) for users in options.concurrency]
    settings = {"config": asdict(config), "shape": asdict(shape)}
    open_cells = [cell for cell in cells if finished(options.output / cell.file) is None]
    if not open_cells:
        print("all cells are there")
        return
    core = EngineCore(config, _tell)
    print(f"ready after {time.monotonic() - began:.1f} s: {core.ready().facts}", flush=True)
    command = ["python", "benchmarks/agent_h200.py", *words]
    for number, cell in enumerate(open_cells):
        left = options.budget - ENDS_S - (time.monotonic() - began)
        if left <= 0:
            print(f"no time is left for {[cell.concurrency for cell in open_cells[number:]]} users")
            break
        # Cells of few users take less: what they leave goes to those behind them.
        pace = Pace(cell.concurrency, limit=left / (len(open_cells) - number))
        load = Load(cell.concurrency, seed=cells.index(cell), shape=shape)
        found = hold_on(core, config, load, pace, options.label, 1, command)
        report.write(options.output / cell.file, found | {"sweep": settings})
        _print(found)
        _page(options.output, cells)
    core.close()


def _page(folder: Path, cells: list[Cell]) -> None:
    found = [result for cell in cells if (result := finished(folder / cell.file)) is not None]
    write_page(folder / "page.html", found, "Agent sessions on one GPU, engine alone")


def _print(found: dict[str, Any]) -> None:
    for name, value in report.lines(found):
        print(f"  {name:<48} {value}")
    print(flush=True)


def _tell(progress: LoadProgress) -> None:
    if progress.done == progress.total:
        print(f"{progress.stage}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
