"""Watches the client itself: a benchmark whose client is the bottleneck measures the client."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

BEAT_S = 0.02
BUSY_SHARE = 0.7
LAG_S = 0.01


@dataclass
class Watch:
    """Lags of the event loop in seconds, CPU and wall seconds."""

    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0
    wall: float = 0.0

    def report(self) -> dict[str, float | str]:
        """Share of one core that the client took, how late its event loop was, and a warning if either may
        show in the figures ('' if not).
        """
        share = self.cpu / self.wall if self.wall > 0 else 0.0
        lags = np.array(self.lags or [0.0])
        late = float(np.percentile(lags, 99))
        warning = ""
        if share > BUSY_SHARE:
            warning = f"the client took {share:.0%} of a core: its own work may be in the figures"
        elif late > LAG_S:
            warning = (
                f"the client's event loop was up to {late * 1e3:.0f} ms late (p99): gaps are that uncertain"
            )
        return {
            "cpu_share": round(share, 4),
            "loop_lag_ms_median": round(float(np.median(lags)) * 1e3, 3),
            "loop_lag_ms_p99": round(late * 1e3, 3),
            "loop_lag_ms_max": round(float(lags.max()) * 1e3, 3),
            "warning": warning,
        }


@asynccontextmanager
async def watched(
    now: Callable[[], float], cpu: Callable[[], float] = time.process_time
) -> AsyncIterator[Watch]:
    """Watch while the block runs; `now` and `cpu` give seconds."""
    watch = Watch()
    began, used = now(), cpu()

    async def beat() -> None:
        while True:
            before = now()
            await asyncio.sleep(BEAT_S)
            watch.lags.append(max(0.0, now() - before - BEAT_S))

    beating = asyncio.create_task(beat())
    try:
        yield watch
    finally:
        beating.cancel()
        watch.cpu, watch.wall = cpu() - used, now() - began
