"""A recorded agent session through the whole engine reuses what could be reused."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import engine_replay  # noqa: E402


def test_cached_over_ceiling() -> None:
    """With the working set on the device; answers are cut short, which changes nothing of what prompts
    share.
    """
    run = engine_replay.measure(ROOT / "tests/control/data", 1.0, ["trace_0538"], most_answer=16)
    print(run)
    assert run["least"] >= 0.99
