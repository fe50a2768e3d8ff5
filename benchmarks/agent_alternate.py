"""The same agent sessions against several servers on one machine, one after the other, in rounds.

    python benchmarks/agent_alternate.py --output benchmarks/results/agent_cpu \\
      --server "quickturn=quickturn serve embedded --port {port}" \\
      --server "llama.cpp=llama-server -m model.gguf --port {port} -np 4 -c 32768" \\
      -- --first 2000 --grow 100 --turns 4 --answer 48

A machine that others use, too, is faster in one minute than in the next: servers take turns, each round with
text of its own that is the same for all of them, and the page shows the round of each cell that is the median
by a user's tokens/s. Every round is kept as a file. What stands behind `--` goes to `quickturn bench agent`.
"""

import argparse
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quickturn.bench.agent import report
from quickturn.bench.agent.page import write_page

START_S = 300.0
RUN = [sys.executable, "-c", "from quickturn.cli.main import app; app()", "bench", "agent"]


def main(words: list[str]) -> None:
    """All rounds, the page, and a line a cell."""
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND with {port} in it")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--title", default="Agent sessions, servers in alternation")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    options = parser.parse_args(words[:cut])
    servers = dict(server.split("=", 1) for server in options.server)
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        # The order turns round, so that nobody always comes first.
        for name, command in list(servers.items())[:: 1 if number % 2 == 0 else -1]:
            with started(command, options.output / f"{name}.log") as url:
                for users in options.concurrency:
                    path = options.output / f"{name}_users{users}_round{number}.json"
                    load = ["--concurrency", str(users), "--sessions", str(users), "--seed"]
                    load.append(str(1000 * number + users))
                    goal = ["--url", url, "--label", name, "--output", str(path)]
                    subprocess.run([*RUN, *goal, *load, *words[cut + 1 :]], check=True)
                    result = report.read(path) | {"server_command": command}
                    report.write(path, result)
                    found.setdefault((name, users), []).append(result)
    chosen = [sorted(results, key=speed)[len(results) // 2] for results in found.values()]
    write_page(options.output / "page.html", chosen, options.title)
    for (name, users), results in found.items():
        rates = ", ".join(f"{speed(result):.1f}" for result in results)
        print(f"{name}, {users} users: {rates} tokens/s a user")


def speed(result: dict[str, Any]) -> float:
    """Median tokens/s of a user; 0 where nobody had an answer."""
    rates = result["figures"]["user_tokens_per_second"]
    return float(rates["median"]) if rates else 0.0


@contextmanager
def started(command: str, log: Path) -> Iterator[str]:
    """A server while the block runs; its URL. Raises RuntimeError when it doesn't come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        words = shlex.split(command.format(port=port))
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{words[0]} did not come up; see {log}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
