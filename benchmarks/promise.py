"""A long prompt beside a user who is being answered, and more users than can be served well: what they get
before and after a promise is set.

    python benchmarks/promise.py --json benchmarks/results/promise_cpu.json
    python benchmarks/promise.py benchmarks/shapes/qwen3-8b --reader 4094 --newcomer 65535 \
        --serve "--load-format dummy --dtype bfloat16 --max-context 70000" --json promise_h200.json

The first needs nothing but the embedded model. With `--in-process` the engine runs in this process and
nothing of the server is needed; then nobody is turned away. Times are the client's.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

STEADY = 40
"""Tokens of the reader before the newcomer comes; the first quarter isn't counted."""
CROWD_PROMPT, CROWD_ANSWER = 128, 48
WAIT_S = 3.0
"""How long a request waits for a place here."""
START_S = 900


@dataclass(frozen=True)
class Beside:
    """Gaps between the reader's tokens in milliseconds, alone and while the newcomer's prompt is computed,
    and the newcomer's seconds to the first token, alone and beside the reader.
    """

    steady_gap_ms: float
    gap_median_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    newcomer_alone_s: float
    newcomer_beside_s: float
    newcomer_ratio: float


@dataclass(frozen=True)
class Crowd:
    """Users who come at once: tokens a second of those served, and how many were turned away for how long."""

    users: int
    served: int
    turned_away: int
    retry_after_s: list[int]
    tps_median: float
    tps_least: float


class TurnedAway(Exception):
    """429; its argument is the seconds of Retry-After."""


class Door(Protocol):
    """A way into an engine."""

    vocabulary: int

    def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[float]:
        """When each token came. Raises TurnedAway."""


class Server:
    """A server process, through HTTP."""

    def __init__(self, url: str, vocabulary: int) -> None:
        import httpx

        self.vocabulary = vocabulary
        self._url = url
        self._client = httpx.AsyncClient(timeout=None)

    async def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[float]:
        """See `Door`."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        async with self._client.stream("POST", f"{self._url}/completions", json=body) as answer:
            if answer.status_code == 429:
                raise TurnedAway(int(answer.headers["retry-after"]))
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()


class InProcess:
    """An engine in this process."""

    def __init__(self, model: str, options: list[str], promise: float) -> None:
        from quickturn.config import EngineConfig
        from quickturn.engine.core import EngineCore

        fields = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs(options)}
        numbers = {name: int(value) if value.isdecimal() else value for name, value in fields.items()}
        config = EngineConfig(model, min_tps_per_user=promise, **numbers)  # type: ignore[arg-type]
        self._core = EngineCore(config)
        self.vocabulary = self._core.ready().vocab_size
        self._queues: dict[int, asyncio.Queue[float | None]] = {}
        self._runs: asyncio.Task[None] | None = None
        self._ids = 0

    async def stream(self, prompt: list[int], tokens: int) -> AsyncIterator[float]:
        """See `Door`."""
        from quickturn.engine.messages import AddRequest, CancelRequest
        from quickturn.sampling_params import SamplingParams

        self._ids += 1
        id = self._ids
        queue = self._queues[id] = asyncio.Queue()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        packed = np.array(prompt, dtype=np.int32).tobytes()
        self._core.add(AddRequest(id, packed, sampling, time.monotonic()))
        if self._runs is None or self._runs.done():
            self._runs = asyncio.create_task(self._run())
        try:
            while (came := await queue.get()) is not None:
                yield came
        finally:
            del self._queues[id]
            self._core.cancel(CancelRequest(id))

    async def _run(self) -> None:
        while self._core.has_work():
            outputs = self._core.step().outputs
            self._core.news()
            now = time.perf_counter()
            for output in outputs:
                queue = self._queues.get(output.id)
                if queue is None:
                    continue
                for _ in output.tokens:
                    queue.put_nowait(now)
                if output.finish:
                    queue.put_nowait(None)
            await asyncio.sleep(0)


def pairs(options: list[str]) -> list[tuple[str, str]]:
    """`--name value` each."""
    return list(zip(options[::2], options[1::2], strict=True))


async def first_token(door: Door, prompt: list[int]) -> float:
    """Seconds to it."""
    began = time.perf_counter()
    stream = door.stream(prompt, 1)
    async for came in stream:
        return came - began
    raise RuntimeError("there was no token")


async def measure_beside(door: Door, reader: int, newcomer: int, random: np.random.Generator) -> Beside:
    """One reader, and one long prompt in the middle of its answer."""

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(0, door.vocabulary, length)]

    await first_token(door, prompt(newcomer))  # what is learned and compiled along the way
    alone = await first_token(door, prompt(newcomer))
    times: list[float] = []
    steady, over = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        stream = door.stream(prompt(reader), 1 << 20)
        async for came in stream:
            times.append(came)
            if len(times) == STEADY:
                steady.set()
            if over.is_set():
                break
        await stream.aclose()  # type: ignore[attr-defined]

    reading = asyncio.create_task(read())
    await asyncio.wait({reading, asyncio.create_task(steady.wait())}, return_when=asyncio.FIRST_COMPLETED)
    began, at = time.perf_counter(), len(times)
    beside = await first_token(door, prompt(newcomer))
    over.set()
    await reading
    before = np.diff(times[STEADY // 4 : at]) * 1e3
    during = np.diff([moment for moment in times[at - 1 :] if moment <= began + beside]) * 1e3
    return Beside(
        steady_gap_ms=round(float(np.median(before)), 3),
        gap_median_ms=round(float(np.median(during)), 3),
        gap_p99_ms=round(float(np.quantile(during, 0.99)), 3),
        gap_max_ms=round(float(during.max()), 3),
        newcomer_alone_s=round(alone, 3),
        newcomer_beside_s=round(beside, 3),
        newcomer_ratio=round(beside / alone, 3),
    )


async def measure_crowd(door: Door, users: int, random: np.random.Generator) -> Crowd:
    """All at once."""
    speeds: list[float] = []
    retries: list[int] = []

    async def ask() -> None:
        prompt = [int(token) for token in random.integers(0, door.vocabulary, CROWD_PROMPT)]
        try:
            times = [came async for came in door.stream(prompt, CROWD_ANSWER)]
        except TurnedAway as refused:
            retries.append(refused.args[0])
        else:
            speeds.append((len(times) - 1) / (times[-1] - times[0]))

    await asyncio.gather(*(ask() for _ in range(users)))
    found = speeds or [0.0]
    return Crowd(
        users,
        len(speeds),
        len(retries),
        sorted(retries),
        round(float(np.median(found)), 2),
        round(min(found), 2),
    )


@contextlib.contextmanager
def serving(model: str, options: list[str], promise: float) -> Iterator[str]:
    """A server's address while it runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "quickturn", "serve", model, "--port", str(port), *options]
    if promise:
        command += ["--min-tps-per-user", str(promise), "--max-queue-wait", str(WAIT_S)]
    process = subprocess.Popen([*command, "--log-level", "warning"])
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Raises RuntimeError if it ends first or takes too long."""
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start: status {process.poll()}")


def with_tokenizer(model: str, folder: Path) -> str:
    """A shape has no tokenizer: one that has a word for each of its tokens goes beside a copy of it."""
    config = Path(model) / "config.json"
    if not config.is_file() or (Path(model) / "tokenizer.json").is_file():
        return model
    from tokenizers import Tokenizer, decoders, models

    described = json.loads(config.read_text())
    size = described.get("text_config", described)["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(size)}, unk_token="t0"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(config.read_text())
    return str(folder)


async def measure(arguments: argparse.Namespace, model: str, promise: float) -> dict[str, Any]:
    """Both cases under one promise (0: none)."""
    options = shlex.split(arguments.serve)
    random = np.random.default_rng(arguments.seed)
    with contextlib.ExitStack() as stack:
        if arguments.in_process:
            door: Door = InProcess(model, options, promise)
        else:
            url = stack.enter_context(serving(model, options, promise))
            door = Server(url, arguments.vocabulary)
        beside = await measure_beside(door, arguments.reader, arguments.newcomer, random)
        crowd = await measure_crowd(door, arguments.users, random)
    print(f"promise {promise:g} tokens/s: {beside}\n  {crowd}", flush=True)
    return {"promised_tps": promise, "beside": asdict(beside), "crowd": asdict(crowd)}


def main() -> None:
    """Measure without a promise, then with one, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--reader", type=int, default=512, help="tokens of the reader's prompt")
    parser.add_argument("--newcomer", type=int, default=6144, help="tokens of the long prompt")
    parser.add_argument("--users", type=int, default=12, help="users of the crowd")
    parser.add_argument("--promise", type=float, default=0.0, help="tokens/s; 0: two thirds of one alone")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="prompts are drawn from so many ids")
    parser.add_argument("--serve", default="", help="options of `quickturn serve`")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model if arguments.in_process else with_tokenizer(arguments.model, Path(folder))
        before = asyncio.run(measure(arguments, model, 0.0))
        alone = 1e3 / before["beside"]["steady_gap_ms"]
        promise = arguments.promise or round(alone * 2 / 3, 1)
        after = asyncio.run(measure(arguments, model, promise))
    result = {
        "command": "python " + shlex.join(sys.argv),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "reader_tokens": arguments.reader,
        "newcomer_tokens": arguments.newcomer,
        "without_a_promise": before,
        "with_a_promise": after,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
