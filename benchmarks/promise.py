"""A long prompt beside a user who is being answered, and more users than can be served well: what they get
under the default promise (no gap between tokens beyond twice the steady one) and under an explicit one.

    python benchmarks/promise.py --json benchmarks/results/promise_cpu.json
    python benchmarks/promise.py benchmarks/shapes/qwen3-8b --reader 4094 --newcomer 65535 --in-process \
        --default-only --users 0 --repeats 1 --limit 20 --json promise_h200.json \
        --serve "--load-format dummy --dtype bfloat16 --max-context 70000"

The first needs nothing but the embedded model. With `--in-process` the engine runs in this process and
nothing of the server is needed; then nobody is turned away, and what the engine expected of its steps is
told beside what they took. Times are the client's. The file is written anew after each measurement.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from promise_doors import Door, InProcess, Server, TurnedAway, serving, with_tokenizer

STEADY = 160
"""Tokens of the reader before the newcomer comes; the first quarter isn't counted. So many that of the gaps
between them, too, one sees what one in a hundred is: no policy holds a bound that those break.
"""
CROWD_PROMPT, CROWD_ANSWER = 128, 48


@dataclass(frozen=True)
class Beside:
    """Gaps between the reader's tokens in milliseconds, alone and while the newcomer's prompt is computed,
    what they may be, and the newcomer's seconds to the first token, alone and beside the reader. `finished`:
    false if it had none when the time was over. `steady_p99`, `steady_max`: of the gaps alone, as multiples
    of their median: what the machine does to any step. `steps`: of an engine in this process, how the steps
    beside the reader compared with what was expected of them. `gaps_ms`: all of them while the newcomer was
    there; `series`: of each step in that time prompt tokens, milliseconds expected, and milliseconds it took.
    """

    steady_gap_ms: float
    steady_p99: float
    steady_max: float
    bound_ms: float
    gap_median_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    share_over_bound: float
    held: bool
    newcomer_alone_s: float
    newcomer_beside_s: float
    newcomer_ratio: float
    finished: bool
    steps: dict[str, float] = field(default_factory=dict)
    gaps_ms: list[float] = field(default_factory=list)
    series: list[tuple[int, float, float]] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"reader: steady {self.steady_gap_ms} ms (p99 {self.steady_p99} x), beside p99"
            f" {self.gap_p99_ms} ms (median {self.gap_median_ms}, most {self.gap_max_ms}), bound"
            f" {self.bound_ms} ms: {'held' if self.held else 'broken'}, {self.share_over_bound:.1%} of gaps"
            " over it; newcomer:"
            f" {self.newcomer_beside_s} s, {self.newcomer_ratio} x alone"
            f"{'' if self.finished else ' and not there yet'}; {self.steps or ''}"
        )


@dataclass(frozen=True)
class Crowd:
    """Users who come at once: tokens a second of those served, and how many were turned away for how long."""

    users: int
    served: int
    turned_away: int
    retry_after_s: list[int]
    tps_median: float
    tps_least: float


async def first_token(door: Door, prompt: list[int]) -> float:
    """Seconds to it."""
    began = time.perf_counter()
    async with contextlib.aclosing(door.stream(prompt, 1)) as stream:
        async for came in stream:
            return came - began
    raise RuntimeError("there was no token")


async def measure_beside(
    door: Door, sizes: tuple[int, int], promise: float, limit: float, random: np.random.Generator
) -> Beside:
    """One reader, and one long prompt in the middle of its answer; `sizes`: tokens of their prompts. After
    `limit` seconds the newcomer is given up.
    """
    reader, newcomer = sizes

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(0, door.vocabulary, length)]

    alone = await first_token(door, prompt(newcomer))
    times: list[float] = []
    steady, over = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(door.stream(prompt(reader), 1 << 20)) as stream:
            async for came in stream:
                times.append(came)
                if len(times) == STEADY:
                    steady.set()
                if over.is_set():
                    return
        raise RuntimeError("the reader's answer ended before the newcomer's began: its context is full")

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(steady.wait())
    await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if reading.done():
        waiting.cancel()
        reading.result()
    door.take_steps()
    began, at = time.perf_counter(), len(times)
    finished = True
    try:
        beside = await asyncio.wait_for(first_token(door, prompt(newcomer)), limit)
    except TimeoutError:
        beside, finished = time.perf_counter() - began, False
    over.set()
    await reading
    before = np.diff(times[STEADY // 4 : at]) * 1e3
    during = np.diff([moment for moment in times[at - 1 :] if moment <= began + beside]) * 1e3
    bound = 1e3 / promise if promise else 2 * float(np.median(before))
    p99, usual = float(np.quantile(during, 0.99)), float(np.median(before))
    steps = door.take_steps()
    return Beside(
        steady_gap_ms=round(usual, 3),
        steady_p99=round(float(np.quantile(before, 0.99)) / usual, 3),
        steady_max=round(float(before.max()) / usual, 3),
        bound_ms=round(bound, 3),
        gap_median_ms=round(float(np.median(during)), 3),
        gap_p99_ms=round(p99, 3),
        gap_max_ms=round(float(during.max()), 3),
        share_over_bound=round(float((during > bound).mean()), 4),
        held=p99 <= bound,
        newcomer_alone_s=round(alone, 3),
        newcomer_beside_s=round(beside, 3),
        newcomer_ratio=round(beside / alone, 3),
        finished=finished,
        steps=summary(steps),
        gaps_ms=np.round(during, 2).tolist(),
        series=[(tokens, round(expected, 2), round(took, 2)) for tokens, expected, took in steps],
    )


def summary(steps: list[tuple[int, float, float]]) -> dict[str, float]:
    """Of steps with prompts beside decoding rows: how many, their prompt tokens, and what they took as a
    multiple of what was expected.
    """
    if not steps:
        return {}
    tokens, expected, took = np.array(steps).T
    off = took / np.maximum(expected, 1e-9)
    figures = {
        "count": len(steps),
        "prompt_tokens_median": np.median(tokens),
        "prompt_tokens_most": tokens.max(),
        "took_ms_median": np.median(took),
        "took_ms_p99": np.quantile(took, 0.99),
        "took_over_expected_median": np.median(off),
        "took_over_expected_p90": np.quantile(off, 0.9),
        "took_over_expected_p99": np.quantile(off, 0.99),
    }
    return {name: round(float(figure), 3) for name, figure in figures.items()}


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


async def measure(
    arguments: argparse.Namespace, model: str, promise: float, note: Callable[[dict[str, Any]], None]
) -> float:
    """Both cases under one promise (0: the default), each given to `note` as it is measured; the reader's
    steady gap in milliseconds.
    """
    options = shlex.split(arguments.serve)
    random = np.random.default_rng(arguments.seed)
    found: dict[str, Any] = {"promised_tps": promise, "beside": []}
    sizes = arguments.reader, arguments.newcomer
    print(f"promise: {f'{promise:g} tokens/s' if promise else 'twice the steady gap'}", flush=True)
    async with contextlib.AsyncExitStack() as stack:
        if arguments.in_process:
            engine = InProcess(model, options, promise)
            stack.push_async_callback(engine.close)
            door: Door = engine
        else:
            url = stack.enter_context(serving(model, options, promise))
            door = Server(url, arguments.vocabulary)
        # What is learned and compiled along the way.
        await first_token(door, [1 + index % 1000 for index in range(arguments.newcomer)])
        for _ in range(arguments.repeats):
            beside = await measure_beside(door, sizes, promise, arguments.limit, random)
            print(f"  {beside}", flush=True)
            found["beside"].append(asdict(beside))
            note(found)
        if arguments.users:
            crowd = await measure_crowd(door, arguments.users, random)
            print(f"  {crowd}", flush=True)
            found["crowd"] = asdict(crowd)
            note(found)
    return float(np.median([one["steady_gap_ms"] for one in found["beside"]]))


def main() -> None:
    """Measure under the default promise, then under an explicit one, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="embedded")
    parser.add_argument("--reader", type=int, default=512, help="tokens of the reader's prompt")
    parser.add_argument("--newcomer", type=int, default=2048, help="tokens of the long prompt")
    parser.add_argument("--users", type=int, default=12, help="users of the crowd; 0: no crowd")
    parser.add_argument("--promise", type=float, default=0.0, help="tokens/s; 0: half of one alone")
    parser.add_argument("--default-only", action="store_true", help="no explicit promise")
    parser.add_argument("--repeats", type=int, default=3, help="newcomers, one after the other")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a newcomer is waited for")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="prompts are drawn from so many ids")
    parser.add_argument("--serve", default="", help="options of `quickturn serve`")
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python " + shlex.join(sys.argv),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "reader_tokens": arguments.reader,
        "newcomer_tokens": arguments.newcomer,
    }

    def note(name: str, found: dict[str, Any]) -> None:
        result[name] = found
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model if arguments.in_process else with_tokenizer(arguments.model, Path(folder))
        steady = asyncio.run(measure(arguments, model, 0.0, partial(note, "default_promise")))
        if not arguments.default_only:
            promise = arguments.promise or round(1e3 / steady / 2, 1)
            asyncio.run(measure(arguments, model, promise, partial(note, "explicit_promise")))


if __name__ == "__main__":
    main()
