"""Agents against the scheduler alone, on a clock with the steps of a mixture of experts of 35B on an H200.

    python benchmarks/agent_clock.py --json benchmarks/results/agent_clock.json

The load of `agent_h200.py`: all users come at once with 50,000 tokens, then 800 a turn, answers of 500, four
turns, no time to think, 70 tokens/s promised. What steps take is that of `tests/control/control_clocks.py`
(measured on one, with noise of 1%); the scheduler doesn't know it. For policy: what waits for what, and
whether the promise holds; a card says what kernels are worth.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import quickturn_control as qc
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "control"))

from control_agents import Agents, Sessions, large_mixture, run_agents  # noqa: E402

TPS = 70.0


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Median, p90, and the most."""
    return {
        "median": round(float(np.median(values)), 3),
        "p90": round(float(np.quantile(values, 0.9)), 3),
        "most": round(float(values.max()), 3),
    }


def figures(users: int, every: int, got: Agents) -> dict[str, object]:
    """Of one run."""
    return {
        "users": users,
        "pause_every": every,
        "seconds": round(got.seconds, 1),
        "first_turn_s": spread(got.first),
        "later_turns_s": spread(got.later),
        "promise_kept": round(float((got.speeds >= TPS).mean()), 3),
        "least_tokens_per_second": round(float(got.speeds.min()), 1),
        "gap_p99_ms": round(1e3 * float(np.quantile(got.gaps, 0.99)), 1),
        "gap_most_ms": round(1e3 * float(got.gaps.max()), 1),
    }


def main() -> None:
    """Prints a line for each number of users and of pauses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--pause-every", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for every in args.pause_every:
        policy = qc.Policy(min_tps_per_user=TPS, max_pause=0.15, pause_every=every)
        for users in args.users:
            got = run_agents(large_mixture(args.seed, policy), Sessions(users), args.seed)
            found.append(figures(users, every, got))
            print(json.dumps(found[-1]), flush=True)
    if args.json:
        command = "python benchmarks/agent_clock.py " + " ".join(sys.argv[1:])
        args.json.write_text(
            json.dumps({"command": command, "seed": args.seed, "runs": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
