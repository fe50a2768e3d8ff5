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

from quickturn.bench.machine import processor
from quickturn.config import EngineConfig
from quickturn.engine.llm import open_core
from quickturn.engine.messages import AddRequest, CancelRequest
from quickturn.sampling_params import SamplingParams

DECODE_PROMPT = 32

WARM_STEPS = 8
"""Decode steps with all rows before counting begins."""


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


@dataclass(frozen=True)
class TimedStep:
    """One step: seconds as its caller saw them, and those within model and sampler."""

    seconds: float
    inside: float


def spread(values: list[float]) -> Spread:
    """Median, minimum and maximum of `values`."""
    return Spread(statistics.median(values), min(values), max(values))


class OfflineBench:
    """One engine and the measurements on it."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        """Start the engine, with all of its ranks; `seed` draws the prompts."""
        self.core = open_core(config)
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
            taken = self.decode_steps([self.prompt(DECODE_PROMPT) for _ in range(batch)], steps)
            speeds.append(batch * steps / sum(step.seconds for step in taken))
            walls.append(statistics.median(step.seconds for step in taken) * 1e3)
            overheads.append(statistics.median(step.seconds - step.inside for step in taken) * 1e3)
        return DecodeFigure(batch, spread(speeds), spread(walls), spread(overheads))

    def decode_steps(self, prompts: list[NDArray[np.int32]], steps: int) -> list[TimedStep]:
        """`steps` decode steps behind `prompts` (of one length), each step with all of them.

        The prompts are computed first and then asked again, from the cache, so that all rows begin within a
        few steps of each other; counting begins when the last one decodes. Raises ValueError, saying what to
        change, if they can't all run together for so long.
        """
        core, batch, facts = self.core, len(prompts), self.core.ready()
        room = min(facts.max_context, facts.cache_tokens // batch) - len(prompts[0])
        refusal = ValueError(
            f"{batch} rows of {len(prompts[0])} + {steps} tokens don't decode together: at most"
            f" {facts.max_requests} requests run at once, the context is {facts.max_context} tokens and the"
            f" cache {facts.cache_tokens}; ask for less, or raise --max-requests or --memory"
        )
        if batch > facts.max_requests or room < WARM_STEPS + steps:
            raise refusal
        for prompt in prompts:
            self.ask(prompt, 1)
        self.drain()
        ids = [self.ask(prompt, room) for prompt in prompts]
        taken: list[TimedStep] = []
        warm = 0
        while len(taken) < steps:
            started = time.perf_counter()
            outputs = core.step().outputs
            seconds = time.perf_counter() - started
            if core.last_step.decode_rows < batch:
                if warm or any(output.finish for output in outputs):
                    self.drop(ids)
                    raise refusal
                continue
            warm += 1
            if warm > WARM_STEPS:
                taken.append(TimedStep(seconds, core.last_step.seconds))
        self.drop(ids)
        return taken

    def prompt(self, length: int) -> NDArray[np.int32]:
        """`length` random token ids."""
        return self._rng.integers(0, self.core.ready().vocab_size, length, dtype=np.int32)

    def add(self, length: int, max_tokens: int) -> int:
        """Add a fresh random prompt that will generate exactly `max_tokens` greedy tokens; its id."""
        return self.ask(self.prompt(length), max_tokens)

    def ask(self, prompt: NDArray[np.int32], max_tokens: int) -> int:
        """Add a request for exactly `max_tokens` greedy tokens behind `prompt`; its id."""
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

    def time_prompt(self, prompt: NDArray[np.int32]) -> tuple[float, int]:
        """Seconds to the first token of `prompt`, and how many of its tokens were cached."""
        self.ask(prompt, 1)
        started = time.perf_counter()
        cached = self.drain()
        return time.perf_counter() - started, cached

    def drop(self, ids: list[int]) -> None:
        """Cancel these requests and run until nothing is left of them."""
        for id in ids:
            self.core.cancel(CancelRequest(id))
        self.drain()

    def drain(self) -> int:
        """Run to the end of all requests; the largest number of cached tokens that one of them reported."""
        cached = 0
        while self.core.has_work():
            cached = max([cached, *(output.cached_tokens for output in self.core.step().outputs)])
        return cached


def machine() -> dict[str, object]:
    """The facts about this machine and software that a figure depends on."""
    return {
        "processor": processor(),
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
