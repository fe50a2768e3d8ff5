"""The offline benchmark: prefill and decode of one engine in this process, optionally beside `transformers`.

Prefill is the time from adding one prompt of random tokens to its first token. Decode is the median step of
a batch in which every request has its prompt in the cache. The engine's own overhead is what a decode step
takes beyond the model and the sampler.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest
from quickturn.sampling_params import SamplingParams

DECODE_PROMPT = 32


@dataclass(frozen=True)
class Spread:
    """Median, best and worst of some repetitions, in the unit of the figure."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class PrefillFigure:
    """Prefill speed for one prompt length."""

    prompt_tokens: int
    tokens_per_second: Spread


@dataclass(frozen=True)
class DecodeFigure:
    """Decode speed of one batch size. Step times in milliseconds; `overhead_ms` is the part outside model
    and sampler.
    """

    batch: int
    tokens_per_second: Spread
    step_ms: Spread
    overhead_ms: Spread


def spread(values: list[float]) -> Spread:
    """Median, minimum and maximum of `values`."""
    return Spread(statistics.median(values), min(values), max(values))


class OfflineBench:
    """One engine and the measurements on it."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        """Start the engine; `seed` draws the prompts."""
        self.core = EngineCore(config)
        self._rng = np.random.default_rng(seed)
        self._next_id = 0

    def prefill(self, length: int, repeats: int) -> PrefillFigure:
        """Time `repeats` fresh prompts of `length` tokens to their first token."""
        speeds = [length / self.prefill_once(length) for _ in range(repeats + 1)]
        return PrefillFigure(length, spread(speeds[1:]))

    def prefill_once(self, length: int) -> float:
        """Seconds from adding one fresh prompt to its first token."""
        return self.time_prompt(self.prompt(length))[0]

    def decode(self, batch: int, steps: int, repeats: int) -> DecodeFigure:
        """Time `steps` decode steps of `batch` requests, `repeats` times."""
        speeds, walls, overheads = [], [], []
        for _ in range(repeats):
            for _ in range(batch):
                self.add(DECODE_PROMPT, steps + 4)
            while self.core.last_step.decode_rows < batch:
                self.core.step()
            taken, beyond = [], []
            started = time.perf_counter()
            for _ in range(steps):
                step_started = time.perf_counter()
                self.core.step()
                wall = time.perf_counter() - step_started
                taken.append(wall * 1e3)
                beyond.append((wall - self.core.last_step.seconds) * 1e3)
            speeds.append(batch * steps / (time.perf_counter() - started))
            walls.append(statistics.median(taken))
            overheads.append(statistics.median(beyond))
            self.drain()
        return DecodeFigure(batch, spread(speeds), spread(walls), spread(overheads))

    def prompt(self, length: int) -> NDArray[np.int32]:
        """`length` random token ids."""
        return self._rng.integers(0, self.core.ready().vocab_size, length, dtype=np.int32)

    def add(self, length: int, max_tokens: int) -> int:
        """Add a fresh random prompt that will generate exactly `max_tokens` greedy tokens; its id."""
        return self._add(self.prompt(length), max_tokens)

    def time_prompt(self, prompt: NDArray[np.int32]) -> tuple[float, int]:
        """Seconds to the first token of `prompt`, and how many of its tokens were cached."""
        self._add(prompt, 1)
        started = time.perf_counter()
        cached = self.drain()
        return time.perf_counter() - started, cached

    def drain(self) -> int:
        """Run to the end of all requests; the largest number of cached tokens that one of them reported."""
        cached = 0
        while self.core.has_work():
            cached = max([cached, *(output.cached_tokens for output in self.core.step().outputs)])
        return cached

    def _add(self, prompt: NDArray[np.int32], max_tokens: int) -> int:
        self._next_id += 1
        self.core.add(
            AddRequest(
                id=self._next_id,
                tokens=prompt.tobytes(),
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
                arrival=time.monotonic(),
            )
        )
        return self._next_id


def machine() -> dict[str, object]:
    """The facts about this machine and software that a figure depends on."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "command": " ".join(["quickturn", *sys.argv[1:]]),
    }


def run(
    config: EngineConfig,
    *,
    prefill: list[int],
    decode: list[int],
    steps: int,
    repeats: int,
    log: Callable[[str], None],
) -> dict[str, object]:
    """All measurements of our engine; the result is ready for JSON."""
    bench = OfflineBench(config)
    results: dict[str, object] = {"machine": machine(), "config": asdict(config)}
    prefills = []
    for length in prefill:
        figure = bench.prefill(length, repeats)
        log(f"prefill {length:>6}: {figure.tokens_per_second.median:9.1f} tokens/s")
        prefills.append(asdict(figure))
    decodes = []
    for batch in decode:
        decoded = bench.decode(batch, steps, repeats)
        log(
            f"decode batch {batch:>3}: {decoded.tokens_per_second.median:7.1f} tokens/s, step"
            f" {decoded.step_ms.median:.2f} ms, engine overhead {decoded.overhead_ms.median:.3f} ms"
        )
        decodes.append(asdict(decoded))
    bench.core.close()
    return results | {"prefill": prefills, "decode": decodes}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
