"""A grid of runs, each a file: what is there already isn't run again, and a half-written file isn't there."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickturn.bench.agent import report

START_S = 900.0
STOP_S = 40.0
_READY = "serving at "


@dataclass(frozen=True)
class Cell:
    """One run: users at a time, and the tokens/s that the server promised to each (0: none)."""

    concurrency: int
    promise: float

    @property
    def file(self) -> str:
        """Name of its result."""
        return f"promise{self.promise:g}_users{self.concurrency}.json"


def grid(concurrency: Sequence[int], promises: Sequence[float]) -> list[Cell]:
    """All cells, promise by promise: a server is started once for each. Raises ValueError for none."""
    cells = [Cell(users, promise) for promise in promises for users in concurrency]
    if not cells or len(set(cells)) < len(cells) or min(cell.concurrency for cell in cells) < 1:
        raise ValueError(f"concurrency must be different numbers from 1 up, got {list(concurrency)}")
    return cells


def sweep(
    folder: Path,
    cells: Sequence[Cell],
    settings: dict[str, Any],
    measure: Callable[[Cell], dict[str, Any]],
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Results of all cells in `folder`; those that aren't there come from `measure`, and are written whole.

    Raises ValueError for a cell that was run with other `settings`.
    """
    results = []
    settings = json.loads(json.dumps(settings))
    for cell in cells:
        path = folder / cell.file
        found = finished(path)
        if found is None:
            log(f"{cell.file}: running")
            found = measure(cell) | {"sweep": settings}
            report.write(path, found)
        elif found.get("sweep") != settings:
            raise ValueError(f"{path} was run with other settings: name another folder, or remove it")
        else:
            log(f"{cell.file}: there already")
        results.append(found)
    return results


def finished(path: Path) -> dict[str, Any] | None:
    """The result at `path`; None where there is none, or no whole one."""
    try:
        return report.read(path)
    except ValueError:
        return None


@contextmanager
def serving(model: str, words: Sequence[str], log: Path) -> Iterator[str]:
    """`quickturn serve` as a process while the block runs; its URL. What it says goes to `log`. Raises
    ValueError with its last words when it doesn't start.
    """
    start = "from quickturn.cli.main import app; app()"
    command = [sys.executable, "-c", start, "serve", model, "--port", "0", *words]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield _url(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _url(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        said = log.read_text(errors="replace")
        for line in said.splitlines():
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
        if process.poll() is not None:
            raise ValueError(f"the server did not start: {' '.join(said.splitlines()[-3:])}")
        time.sleep(0.2)
    raise ValueError(f"the server was not ready after {START_S:.0f} s; see {log}")
