"""Recorded agent sessions reuse what could be reused. `QUICKTURN_TRACES` names a folder with more of them."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import control_replay  # noqa: E402

FOLDER = Path(os.environ.get("QUICKTURN_TRACES", Path(__file__).parent / "data"))


@pytest.mark.parametrize(("share", "host", "least"), [(1.0, 0.0, 0.99), (0.65, 2.0, 0.97)])
def test_cached_over_ceiling(share: float, host: float, least: float) -> None:
    """For every session: with the working set on the device, and with 65% of it and a host tier."""
    run = control_replay.measure(FOLDER, share, host)
    print(run)
    assert isinstance(run["least"], float)
    assert run["least"] >= least
