"""How long an engine takes from `exec` to its first token, each time in a new process."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from quickturn.bench.offline import OfflineBench, Spread, spread
from quickturn.config import EngineConfig


@dataclass(frozen=True)
class StartFigure:
    """Seconds from starting the process until the engine is ready, and until the first token of a short
    prompt.
    """

    ready_seconds: Spread
    first_token_seconds: Spread


def measure_start(config: EngineConfig, repeats: int) -> StartFigure:
    """Start `repeats` engines one after the other. Raises RuntimeError with the child's message if one
    fails.
    """
    ready: list[float] = []
    first: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        command = [sys.executable, "-m", "quickturn.bench.start", json.dumps(asdict(config))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for times in (ready, first):
                if not child.stdout.readline():
                    raise RuntimeError("the engine ended before it was ready; its own message stands above")
                times.append(time.perf_counter() - started)
    return StartFigure(spread(ready), spread(first))


def _child() -> None:
    bench = OfflineBench(EngineConfig(**json.loads(sys.argv[1])))
    print("ready", flush=True)
    bench.prefill_once(8)
    print("first token", flush=True)


if __name__ == "__main__":
    _child()
