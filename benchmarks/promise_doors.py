"""Ways into an engine for `promise.py`: through a server of its own, or in this process."""

import asyncio
import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

WAIT_S = 3.0
"""How long a request waits for a place here."""
START_S = 900


class TurnedAway(Exception):
    """429; its argument is the seconds of Retry-After."""


class Door(Protocol):
    """A way into an engine."""

    vocabulary: int

    def stream(self, prompt: list[int], tokens: int) -> AsyncGenerator[float, None]:
        """When each token came. Raises TurnedAway."""

    def take_steps(self) -> list[tuple[int, float, float]]:
        """(prompt tokens, milliseconds expected, milliseconds it took) of each step since the last call that
        had prompts beside decoding rows; empty if that isn't known.
        """


class Server:
    """A server process, through HTTP."""

    def __init__(self, url: str, vocabulary: int) -> None:
        import httpx

        self.vocabulary = vocabulary
        self._url = url
        self._client = httpx.AsyncClient(timeout=None)

    async def stream(self, prompt: list[int], tokens: int) -> AsyncGenerator[float, None]:
        """See `Door`."""
        body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0, "ignore_eos": True}
        async with self._client.stream("POST", f"{self._url}/completions", json=body) as answer:
            if answer.status_code == 429:
                raise TurnedAway(int(answer.headers["retry-after"]))
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield time.perf_counter()

    def take_steps(self) -> list[tuple[int, float, float]]:
        """See `Door`."""
        return []


class InProcess:
    """An engine in this process."""

    def __init__(self, model: str, options: list[str], promise: float) -> None:
        from quickturn.openmp import set_short_spins

        # As a server's engine has it: before torch is there.
        set_short_spins(os.environ)
        from quickturn.config import EngineConfig
        from quickturn.engine.core import EngineCore

        fields = {name.removeprefix("--").replace("-", "_"): value for name, value in pairs(options)}
        numbers = {name: int(value) if value.isdecimal() else value for name, value in fields.items()}
        config = EngineConfig(model, min_tps_per_user=promise, **numbers)  # type: ignore[arg-type]
        self._core = EngineCore(config)
        self.vocabulary = self._core.ready().vocab_size
        self._queues: dict[int, asyncio.Queue[float | BaseException | None]] = {}
        self._steps: list[tuple[int, float, float]] = []
        self._launched = self._core.last_step
        self._runs: asyncio.Task[None] | None = None
        self._ids = 0

    async def stream(self, prompt: list[int], tokens: int) -> AsyncGenerator[float, None]:
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
                if isinstance(came, BaseException):
                    raise came
                yield came
        finally:
            del self._queues[id]
            self._core.cancel(CancelRequest(id))

    async def close(self) -> None:
        """Ends the engine and gives its memory back: the next one needs all of it."""
        import torch

        if self._runs is not None:
            self._runs.cancel()
            await asyncio.gather(self._runs, return_exceptions=True)
        self._core.close()
        del self._core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def take_steps(self) -> list[tuple[int, float, float]]:
        """See `Door`."""
        steps, self._steps = self._steps, []
        return steps

    async def _run(self) -> None:
        try:
            while self._core.has_work():
                self._deliver()
                await asyncio.sleep(0)
        except BaseException as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
            raise

    def _deliver(self) -> None:
        outputs = self._core.step().outputs
        now = time.perf_counter()
        launched, figures = self._core.last_step, self._core.stats().values
        # Where two are in flight, what has just been measured is the one before.
        step = self._launched if self._core._in_flight else launched
        self._launched = launched
        if 0 < step.decode_rows < step.rows:
            expected, took = figures["step_us_predicted"] / 1e3, figures["step_us_measured"] / 1e3
            self._steps.append((step.tokens - step.decode_rows, expected, took))
        for output in outputs:
            queue = self._queues.get(output.id)
            if queue is None:
                continue
            if output.error:
                queue.put_nowait(RuntimeError(output.error))
            for _ in output.tokens:
                queue.put_nowait(now)
            if output.finish:
                queue.put_nowait(None)


def pairs(options: list[str]) -> list[tuple[str, str]]:
    """`--name value` each."""
    return list(zip(options[::2], options[1::2], strict=True))


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
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


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
