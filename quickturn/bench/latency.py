"""How fast an engine answers: decode steps at a batch and context, and the time to the first token, cold
and cached.

The roof of a decode step is the bytes that it must read (every weight once, the keys and values of every
row) over the rate at which this device was measured to copy memory, in the same run.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quickturn.bench.offline import OfflineBench, Spread, spread

COPY_BYTES = 4 << 30
CPU_COPY_BYTES = 256 << 20


@dataclass(frozen=True)
class DecodeShape:
    """Decode of `batch` rows whose context begins at `context` tokens.

    `roof_ms` is the step at the memory roof, `roof_share` that over the median step.
    """

    batch: int
    context: int
    tokens_per_second: float
    step_ms: Spread
    step_bytes: int
    roof_ms: float
    roof_share: float

    def line(self) -> str:
        """The figure for a terminal."""
        return (
            f"decode {self.batch:>3} x {self.context:>6}: {self.tokens_per_second:8.1f} tokens/s, step"
            f" {self.step_ms.median:.3f} ms, {self.roof_share:.1%} of the roof"
        )


@dataclass(frozen=True)
class FirstToken:
    """Milliseconds to the first token of one prompt: cold, when all but the last 1% was seen, and the same
    again.
    """

    prompt_tokens: int
    cold_ms: Spread
    seen_99_ms: Spread
    seen_99_cached: int
    again_ms: Spread
    again_cached: int

    def line(self) -> str:
        """The figure for a terminal."""
        return (
            f"first token {self.prompt_tokens:>6}: cold {self.cold_ms.median:.1f} ms,"
            f" 99% seen {self.seen_99_ms.median:.1f} ms ({self.seen_99_cached} cached),"
            f" again {self.again_ms.median:.1f} ms ({self.again_cached} cached)"
        )


@dataclass(frozen=True)
class AtOnce:
    """`requests` prompts of `prompt` tokens with `answer` tokens each, all added at once.

    `output_tokens_per_second` counts from the first request to the last token, prefill and all. `decode` is a
    second run on the same prompts, in which counting begins when the last prefill is through and ends before
    the first answer does: every row decodes in every step that counts.
    """

    requests: int
    prompt: int
    answer: int
    output_tokens_per_second: float
    seconds: float
    decode: DecodeShape

    def line(self) -> str:
        """The figure for a terminal."""
        return (
            f"at once {self.requests:>3} x {self.prompt} in, {self.answer} out:"
            f" {self.output_tokens_per_second:.0f} tokens/s in all; all rows in"
            f" {self.decode.line()}"
        )


def copy_rate(device: torch.device) -> float:
    """Bytes a second of a large copy on `device`, read and write counted: the memory roof."""
    size = (COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES) // 2
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        _wait(device)
        started = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds[2:])


def decode_shape(bench: OfflineBench, batch: int, context: int, steps: int, rate: float) -> DecodeShape:
    """Median decode step of `batch` requests behind `context` cached tokens each.

    Every step that counts decodes all rows. Raises ValueError, saying what to change, when they can't run
    together.
    """
    return decode_prompts(bench, [bench.prompt(context) for _ in range(batch)], steps, rate)


def decode_prompts(
    bench: OfflineBench, prompts: list[NDArray[np.int32]], steps: int, rate: float
) -> DecodeShape:
    """The same behind given prompts of one length."""
    batch, context = len(prompts), len(prompts[0])
    taken = [step.seconds * 1e3 for step in bench.decode_steps(prompts, steps)]
    step_bytes = bench.core.step_bytes(batch, context + steps // 2)
    roof_ms = step_bytes / rate * 1e3
    median = statistics.median(taken)
    return DecodeShape(
        batch, context, batch / median * 1e3, spread(taken), step_bytes, roof_ms, roof_ms / median
    )


def first_token(bench: OfflineBench, length: int, repeats: int) -> FirstToken:
    """Time to the first token of fresh prompts, each then repeated with a new last 1%, and as it was."""
    cold, nearly, again = [], [], []
    nearly_cached = again_cached = 0
    tail = max(1, length // 100)
    for _ in range(repeats + 1):
        prompt = bench.prompt(length)
        cold.append(bench.time_prompt(prompt)[0])
        changed = np.concatenate((prompt[:-tail], bench.prompt(tail)))
        seconds, nearly_cached = bench.time_prompt(changed)
        nearly.append(seconds)
        seconds, again_cached = bench.time_prompt(prompt)
        again.append(seconds)

    def milliseconds(values: list[float]) -> Spread:
        return spread([value * 1e3 for value in values[1:]])

    return FirstToken(
        length, milliseconds(cold), milliseconds(nearly), nearly_cached, milliseconds(again), again_cached
    )


def at_once(bench: OfflineBench, requests: int, prompt: int, answer: int, steps: int, rate: float) -> AtOnce:
    """Throughput of `requests` added together, then decode of all of them (at most `steps` steps)."""
    prompts = [bench.prompt(prompt) for _ in range(requests)]
    for one in prompts:
        bench.ask(one, answer)
    started = time.perf_counter()
    bench.drain()
    seconds = time.perf_counter() - started
    decode = decode_prompts(bench, prompts, min(steps, answer), rate)
    return AtOnce(requests, prompt, answer, requests * answer / seconds, seconds, decode)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
