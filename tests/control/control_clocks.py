"""Clocks with the shapes of real machines, unknown to the scheduler: what steps take, with noise."""

from collections.abc import Callable
from random import Random

import numpy as np
import quickturn_control as qc
from control_sim import Sim, prompt

Clock = Callable[[qc.StepPlan], float]


def noisy(clock: Clock, random: Random, spread: float, stalls: float) -> Clock:
    """Each step off by about `spread` of itself; a share `stalls` of them takes up to twice as long."""

    def seconds(plan: qc.StepPlan) -> float:
        stall = 1 + random.random() if random.random() < stalls else 1.0
        return clock(plan) * float(np.exp(random.gauss(0, spread))) * stall

    return seconds


def tailed(clock: Clock, random: Random, spread: float, share: float, late: tuple[float, float]) -> Clock:
    """Each step off by about `spread` of itself; `share` of them so many milliseconds late, since somebody
    else had the processor.
    """

    def seconds(plan: qc.StepPlan) -> float:
        more = 1e-3 * random.uniform(*late) if random.random() < share else 0.0
        return clock(plan) * float(np.exp(random.gauss(0, spread))) + more

    return seconds


def small_cpu(plan: qc.StepPlan) -> float:
    """Two cores and a model of 135M: reading weights takes 14.5 ms whatever else is done, arithmetic comes in
    tiles of 32 tokens, and a prompt's attention reads its whole context for every 32 of its tokens.
    """
    rows = plan.num_decode_rows
    took = 14.5 + 0.5 * max(0, rows - 1) + 1.8e-3 * float(plan.context_lens[:rows].sum())
    for tokens, context in zip(plan.query_lens[rows:], plan.context_lens[rows:], strict=True):
        took += 0.19 * tokens + (3.5 if tokens > 31 else 0.0)
        took += context / 1000 * (2.4 + (2.4 * -(-tokens // 32) if tokens <= 64 else 0.075 * tokens))
    return 1e-3 * float(took)


def large_gpu(plan: qc.StepPlan) -> float:
    """An 8B model on an H200: decode steps are one graph, 3 ms more are spent on the host once a prompt is in
    the step, 26 tokens take a millisecond, and attention grows with queries times keys.
    """
    rows = plan.num_decode_rows
    decode = 4.2 + 0.01 * rows + 3.5e-5 * float(plan.context_lens[:rows].sum())
    queries, contexts = plan.query_lens[rows:].astype(float), plan.context_lens[rows:].astype(float)
    if not len(queries):
        return 1e-3 * decode
    attention = 1e-6 * float((queries * (contexts + queries / 2)).sum()) + 3e-5 * float(contexts.sum())
    return 1e-3 * (max(decode + (3.0 if rows else 0.0), 1.0 + plan.num_tokens / 26) + attention)


def recorded_gpu(recorded: list[tuple[int, int]]) -> Clock:
    """The same, with recorded steps (decode rows, tokens in all): what is padding costs time, too. Others are
    launched kernel by kernel, in 11.7 ms.
    """

    def seconds(plan: qc.StepPlan) -> float:
        rows, pieces = plan.num_decode_rows, plan.query_lens[plan.num_decode_rows :].tolist()
        if not rows or not pieces:
            return large_gpu(plan)
        decode = 4.2 + 0.01 * rows + 3.5e-5 * float(plan.context_lens[:rows].sum())
        attention = 1e-6 * sum(pieces) * float(plan.context_lens[rows:].max() + sum(pieces))
        held = [t for r, t in recorded if len(pieces) == 1 and r >= rows and t - r >= pieces[0]]
        took = min(held, default=plan.num_tokens)
        return 1e-3 * (max(decode, 1.0 + took / 26, 0.0 if held else 11.7) + attention)

    return seconds


RECORDED = [(rows, tokens) for rows in (1, 2, 4, 8, 16) for tokens in (32, 64, 128, 256, 512)]
"""Decode rows and tokens in all of the steps that the mixture has graphs of."""


def mixture(plan: qc.StepPlan) -> float:
    """A mixture of experts of 35B on an H200: a step reads the experts that its tokens chose, so that the
    first tokens beside decoding rows cost most; launched kernel by kernel it takes 38 ms at least.
    """

    def line(x: float, *points: tuple[int, float]) -> float:
        return float(np.interp(x, [at for at, _ in points], [ms for _, ms in points]))

    rows, pieces = plan.num_decode_rows, plan.query_lens[plan.num_decode_rows :].tolist()
    decode = line(rows, (0, 0), (1, 2.8), (2, 3.5), (8, 6.3), (16, 9.0), (32, 13.0))
    decode += 5e-6 * float(plan.context_lens[:rows].sum())
    if not pieces:
        return 1e-3 * decode
    tokens = sum(pieces)
    held = [t for r, t in RECORDED if len(pieces) == 1 and 0 < rows <= r and t - r >= tokens]
    if held:
        return 1e-3 * (decode + line(min(held), (16, 7.2), (32, 10.9), (64, 14.4), (128, 16.3), (512, 20.0)))
    return 1e-3 * max(38.0, (decode + 20.0 if rows else 0.0) + 0.018 * tokens)


class Beside:
    """A reader whose answer a long prompt interrupts: seconds between its tokens, steady and meanwhile, the
    prompt tokens of each step, and seconds to the newcomer's first token.
    """

    def __init__(self, sim: Sim, reader: int, newcomer: int, seed: int = 0) -> None:
        """Runs it."""
        a = sim.add(prompt(reader, 10 * seed + 1), 1 << 20)
        while len(sim.token_times.get(a, [])) < 40:
            sim.step()
        times = sim.token_times[a]
        self.steady = float(np.median(np.diff(times[10:])))
        start, at, first = sim.now, len(times), len(sim.plans)
        b = sim.add(prompt(newcomer, 10 * seed + 2))
        while b not in sim.token_times:
            sim.step()
            assert len(sim.plans) - first < newcomer, "the newcomer starves"
        self.first_token = sim.now - start
        self.gaps = np.diff(times[at - 1 :])
        self.chunks = [plan.num_tokens - plan.num_decode_rows for plan in sim.plans[first:]]
        sim.scheduler.cancel(a)
        sim.run()
