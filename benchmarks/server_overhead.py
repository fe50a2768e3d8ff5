"""What the server costs a streamed token: CPU time of its one process, and the delay that it adds.

    python benchmarks/server_overhead.py --output benchmarks/results/server_overhead.json
    python benchmarks/server_overhead.py --peer "transformers serve DIR --port {port}" --peer-model DIR

An engine that computes nothing (`instant_core.py`) answers with one token a step. CPU time is the server
process's own, from the kernel's books; the engine's and the client's are not in it. The delay of a token is
from the engine's send to the client's read of the event, on one clock. `write` is what the system takes to
write an event into a socket that somebody reads, and nothing else: no server can be below it.

A peer is a server that answers the same requests with a model of its own, in threads beside the one of its
event loop. The latter's time alone is taken as its server's, which leaves out what those threads do for it.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
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
    """`rounds` times `streams` answers at once of `tokens` tokens each, at `pace` tokens a second each (0: no
    bound).
    """

    streams: int
    tokens: int
    pace: float
    rounds: int = 1


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
    parser.add_argument("--runs", type=int, default=3, help="the one with the median CPU time counts")
    parser.add_argument("--peer", help="command of another server; {port} stands for its port")
    parser.add_argument("--peer-model", default="")
    parser.add_argument("--peer-streams", type=int, default=16)
    parser.add_argument("--peer-tokens", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    loads = {
        "70 tokens/s each": Load(options.streams, options.tokens, 70.0),
        "as fast as it goes": Load(options.streams, options.tokens, 0.0),
        "answers of one token": Load(64, 1, 0.0, rounds=20),
    }
    results: dict[str, object] = {}
    for name, load in loads.items():
        runs = sorted((measure(load) for _ in range(options.runs)), key=lambda run: run.cpu_us_per_token)
        results[name] = {
            **vars(runs[len(runs) // 2]),
            "cpu_us_per_token_of_runs": [run.cpu_us_per_token for run in runs],
        }
        print(name, json.dumps(results[name]), flush=True)
    results["write"] = sorted(write_us(options.streams) for _ in range(options.runs))
    if options.peer:
        few = Load(options.peer_streams, options.peer_tokens, 70.0)
        pair = {
            "peer": measure_peer(options.peer, options.peer_model, few),
            "this": vars(measure(few)),
        }
        results[f"{few.streams} streams of {few.tokens} tokens"] = pair
    print(json.dumps({name: results[name] for name in list(results)[len(loads) :]}), flush=True)
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
            for _ in range(load.rounds):
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
    tokens = load.streams * load.tokens * load.rounds
    whole = [index for index, events in enumerate(arrived) if len(events) == load.tokens]
    delays = np.array([np.array(arrived[index]) - left[index, : load.tokens] for index in whole]) * 1e3
    return Figures(
        cpu_us_per_token=round(cpu / tokens * 1e6, 2),
        tokens_per_second=round(tokens / seconds),
        requests_per_second=round(load.streams * load.rounds / seconds, 1),
        events_per_token=round(sum(map(len, arrived)) / (load.streams * load.tokens), 3),
        delay_ms_median=round(float(np.median(delays)), 3) if whole else float("nan"),
        delay_ms_p99=round(float(np.quantile(delays, 0.99)), 3) if whole else float("nan"),
    )


def measure_peer(command: str, model: str, load: Load) -> dict[str, float]:
    """Start another server, warm it up, send the load, read the books of its first thread."""
    port, quiet = free_port(), subprocess.DEVNULL
    process = subprocess.Popen(shlex.split(command.format(port=port)), stdout=quiet, stderr=quiet)
    try:
        wait_until_ready(port, process)
        asyncio.run(send(port, load, model))
        books = f"{process.pid}/task/{process.pid}"
        before, all_before, started = cpu_seconds(books), cpu_seconds(process.pid), time.monotonic()
        events = sum(map(len, asyncio.run(send(port, load, model))))
        seconds = time.monotonic() - started
        return {
            "event_loop_cpu_us_per_token": round((cpu_seconds(books) - before) / events * 1e6, 2),
            "all_cpu_us_per_token": round((cpu_seconds(process.pid) - all_before) / events * 1e6, 2),
            "tokens_per_second": round(events / seconds),
            "requests_per_second": round(load.streams / seconds, 1),
        }
    finally:
        process.terminate()
        process.wait()


def write_us(streams: int, steps: int = 300, size: int = 260) -> float:
    """CPU time, in us, to write an event of `size` bytes into one of `streams` sockets of this machine."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=streams)
    port = listening.getsockname()[1]
    code = (
        "import selectors, socket\n"
        f"all = [socket.create_connection(('127.0.0.1', {port})) for _ in range({streams})]\n"
        "chosen = selectors.DefaultSelector()\n"
        "for each in all: chosen.register(each, selectors.EVENT_READ)\n"
        "while all:\n"
        "    for key, _ in chosen.select():\n"
        "        if not key.fileobj.recv(65536): chosen.unregister(key.fileobj), all.remove(key.fileobj)\n"
    )
    reader = subprocess.Popen([sys.executable, "-c", code])
    connections = [listening.accept()[0] for _ in range(streams)]
    event, spent = bytes(size), 0.0
    for _ in range(steps):
        before = time.process_time()
        for connection in connections:
            connection.sendall(event)
        spent += time.process_time() - before
        time.sleep(1 / 70)
    for connection in [*connections, listening]:
        connection.close()
    reader.wait()
    return round(spent / steps / streams * 1e6, 2)


async def send(port: int, load: Load, model: str = "") -> list[list[float]]:
    """All streams at once; when each event with text was read."""
    return await asyncio.gather(*(stream(port, load, index, model) for index in range(load.streams)))


async def stream(port: int, load: Load, index: int, model: str) -> list[float]:
    """One streamed chat over a connection of its own, read with as little work as can be."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": load.tokens,
            "stream": True,
            "temperature": 0,
            **({"model": model} if model else {"prompt_cache_key": str(index)}),
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
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


def cpu_seconds(pid: int | str) -> float:
    """User and system time of a process without its children, or of one thread (`PID/task/TID`)."""
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
