"""What the server costs a streamed token: CPU time of its one process, and the delay that it adds.

    python benchmarks/server_overhead.py --output benchmarks/results/server_overhead.json

An engine that computes nothing (`instant_core.py`) answers with one token a step. CPU time is the server
process's own, from the kernel's books; the engine's and the client's are not in it. The delay of a token is
from the engine's send to the client's read of the event, on one clock.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from instant_core import MOST_STREAMS, MOST_TOKENS
from numpy.typing import NDArray

HERE = Path(__file__).parent
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """`streams` answers at once of `tokens` tokens each, at `pace` tokens a second each (0: no bound)."""

    streams: int
    tokens: int
    pace: float


@dataclass(frozen=True)
class Figures:
    """What one load cost, times as named. `events_per_token`: below 1 when the server was behind and joined
    tokens.
    """

    cpu_us_per_token: float
    tokens_per_second: float
    requests_per_second: float
    events_per_token: float
    delay_ms_median: float
    delay_ms_p99: float


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = {}
    for name, pace in (("70 tokens/s each", 70.0), ("as fast as it goes", 0.0)):
        load = Load(options.streams, options.tokens, pace)
        figures = measure(load)
        results[name] = vars(figures)
        print(name, json.dumps(vars(figures)), flush=True)
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": {
            "cpu": platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "streams": options.streams,
        "tokens": options.tokens,
        "results": results,
    }
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def measure(load: Load) -> Figures:
    """Start a server, warm it up, send the load, read the books."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        left = np.memmap(times, np.float64, "w+", shape=(MOST_STREAMS, MOST_TOKENS))
        port = free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "INSTANT_CORE_TIMES": str(times),
            "INSTANT_CORE_PACE": str(load.pace),
        }
        command = [sys.executable, "-m", "quickturn", "serve", "embedded", "--port", str(port)]
        command += ["--core", "instant_core:InstantCore", "--log-level", "warning"]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(port, process)
            asyncio.run(send(port, Load(load.streams, 20, load.pace)))
            before, started = cpu_seconds(process.pid), time.monotonic()
            arrived = asyncio.run(send(port, load))
            seconds, cpu = time.monotonic() - started, cpu_seconds(process.pid) - before
        finally:
            process.terminate()
            process.wait()
        return figures_of(load, arrived, left, seconds, cpu)


def figures_of(
    load: Load, arrived: list[list[float]], left: NDArray[np.float64], seconds: float, cpu: float
) -> Figures:
    """`arrived`: when each event of each stream was read. Delays are those of streams in which no tokens were
    joined.
    """
    tokens = load.streams * load.tokens
    whole = [index for index, events in enumerate(arrived) if len(events) == load.tokens]
    delays = np.array([np.array(arrived[index]) - left[index, : load.tokens] for index in whole]) * 1e3
    return Figures(
        cpu_us_per_token=round(cpu / tokens * 1e6, 2),
        tokens_per_second=round(tokens / seconds),
        requests_per_second=round(load.streams / seconds, 1),
        events_per_token=round(sum(map(len, arrived)) / tokens, 3),
        delay_ms_median=round(float(np.median(delays)), 3) if whole else float("nan"),
        delay_ms_p99=round(float(np.quantile(delays, 0.99)), 3) if whole else float("nan"),
    )


async def send(port: int, load: Load) -> list[list[float]]:
    """All streams at once; when each event with text was read."""
    return await asyncio.gather(*(stream(port, load, index) for index in range(load.streams)))


async def stream(port: int, load: Load, index: int) -> list[float]:
    """One streamed chat over a connection of its own, read with as little work as can be."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": load.tokens,
            "stream": True,
            "temperature": 0,
            "prompt_cache_key": str(index),
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    arrived: list[float] = []
    async for line in reader:
        if line.startswith(b'data: {"error"'):
            raise RuntimeError(line.decode())
        if line.startswith(b"data: {") and b'"content":"' in line and b'"role"' not in line:
            arrived.append(time.monotonic())
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return arrived


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its children not included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return when the server takes requests. Raises RuntimeError when it ends instead."""
    while process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise RuntimeError(f"the server ended with status {process.returncode}")


if __name__ == "__main__":
    main()
