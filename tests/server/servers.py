"""Servers as processes of their own: real sockets, real signals, a real engine process
behind each.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent

PATIENCE_S = 60.0
"""How long a test waits for what happens at once on a machine that isn't busy."""

http = httpx.Client(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
"""For single requests. No connection is kept: the server of the next request may be another, or gone."""


class Figures(dict[str, float]):
    """What an engine in a long step hasn't told yet is no number, which no condition holds for."""

    def __missing__(self, name: str) -> float:
        return math.nan


@dataclass
class Served:
    process: "subprocess.Popen[str]"
    url: str

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        pids = [int(pid) for pid in children if b"quickturn.engine.process" in _command(int(pid))]
        assert len(pids) == 1, f"children {children}"
        return pids[0]

    def stats(self) -> dict[str, float]:
        page = http.get(f"{self.root}/metrics").text
        lines = [line.split() for line in page.splitlines() if not line.startswith("#")]
        return Figures({name: float(value) for name, value in (line for line in lines if len(line) == 2)})

    def wait_for(
        self, condition: Callable[[dict[str, float]], bool], seconds: float = PATIENCE_S
    ) -> dict[str, float]:
        """Poll the metrics until `condition` holds; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline, f"never happened; the last figures are {stats}"
            time.sleep(0.005)
        return stats


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def start_server(model: Path | str, **options: Any) -> Served:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
        # Threads that spin at barriers make a model ten times slower when tests share the machine's cores.
        "OMP_WAIT_POLICY": "passive",
    }
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_server.py"), json.dumps({"model": str(model), **options})],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the server did not start: status {process.wait()}"
    return Served(process, json.loads(line)["url"])


def stop_server(served: Served) -> None:
    if served.process.poll() is None:
        served.process.send_signal(signal.SIGTERM)
        try:
            served.process.wait(15)
        except subprocess.TimeoutExpired:
            served.process.kill()
            served.process.wait()
    if served.process.stdout is not None:
        served.process.stdout.close()
