"""Fixtures: a misbehaving server as a process of its own."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).parent / "bench_server.py"


@pytest.fixture
def bench_server() -> Iterator[Callable[[], str]]:
    """Starts servers; each call gives the URL of a new one."""
    started: list[subprocess.Popen[str]] = []

    def start() -> str:
        process = subprocess.Popen([sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the server did not start"
        return f"http://127.0.0.1:{port}/v1"

    yield start
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
