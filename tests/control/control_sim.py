"""A simulated clock and a device that only takes time: for contexts too long for the content oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import quickturn_control as qc
from numpy.typing import NDArray

UNIT = 64
FULL = qc.GroupConfig("full", 50)
STATE = qc.GroupConfig("state", 1)


def roofline(plan: qc.StepPlan) -> float:
    """Seconds of a step on a device like one H200 with an 8B model: weights or arithmetic bind."""
    return (
        max(0.0037, plan.num_tokens / 25600.0) + float(plan.context_lens[: plan.num_decode_rows].sum()) * 3e-9
    )


def prompt(length: int, seed: int) -> NDArray[np.int32]:
    """Random tokens, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 1 << 17, length, dtype=np.int32)


class Sim:
    """A scheduler and its engine loop. Sampled tokens are 7; transfers take `transfer_seconds` each."""

    def __init__(
        self,
        slabs: int,
        groups: Sequence[qc.GroupConfig] = (FULL, STATE),
        seconds: Callable[[qc.StepPlan], float] = roofline,
        transfer_seconds: float = 0.0005,
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {"max_requests": 64, "max_step_tokens": 2048, "pipeline_depth": 1}
        settings.update(options)
        self.scheduler = qc.Scheduler(qc.SchedulerConfig(groups=list(groups), num_slabs=slabs, **settings))
        self.seconds = seconds
        self.transfer_seconds = transfer_seconds
        self.now = 0.0
        self.next_id = 0
        self.cached: dict[int, int] = {}
        self.token_times: dict[int, list[float]] = {}
        self.ended: dict[int, int] = {}
        self.slot_of: dict[int, int] = {}
        self.copies: list[tuple[float, int]] = []
        self.bus = 0.0
        self.plans: list[qc.StepPlan] = []
        self.retracted: list[int] = []

    def add(self, tokens: NDArray[np.int32], max_tokens: int = 4, **options: Any) -> int:
        """A request that arrives now."""
        self.next_id += 1
        self.scheduler.add(
            qc.Request(self.next_id, tokens, max_tokens=max_tokens, arrival=self.now, **options)
        )
        return self.next_id

    def step(self) -> qc.StepPlan | None:
        """One turn of the engine's loop."""
        done = [number for at, number in self.copies if at <= self.now]
        if done:
            self.copies = [(at, number) for at, number in self.copies if at > self.now]
            self.scheduler.transfers_done(done)
        plan = self.scheduler.plan(self.now)
        if plan is None or not plan.num_rows:
            self._note(plan)
            if self.copies:
                self.now = max(self.now, min(at for at, _ in self.copies))
            else:
                self.now += 0.001
            return plan
        self._note(plan)
        took = self.seconds(plan)
        self.now += took
        owners = {slot: number for number, slot in self.slot_of.items()}
        applied = self.scheduler.apply(
            qc.StepResult(plan.step, np.full(plan.num_samples, 7, np.int32), elapsed_us=took * 1e6)
        )
        for slot in plan.slots[plan.samples == 1].tolist():
            self.token_times.setdefault(owners[slot], []).append(self.now)
        self._end(applied)
        return plan

    def _note(self, plan: qc.StepPlan | None) -> None:
        if plan is None:
            return
        self.plans.append(plan)
        for number in plan.released.ids.tolist():
            self.slot_of.pop(number)
            self.retracted.append(number)
        self._end(plan.ended)
        for number, slot, cached in zip(
            plan.admitted.ids.tolist(),
            plan.admitted.slots.tolist(),
            plan.admitted.cached_tokens.tolist(),
            strict=True,
        ):
            self.slot_of[number] = slot
            self.cached.setdefault(number, cached)
        for transfers in (plan.transfers_before, plan.transfers_after):
            for number in transfers.ids.tolist():
                self.bus = max(self.bus, self.now) + self.transfer_seconds
                self.copies.append((self.bus, number))

    def _end(self, ended: qc.Ended) -> None:
        for number, reason in zip(ended.ids.tolist(), ended.reasons.tolist(), strict=True):
            self.ended[number] = reason
            self.slot_of.pop(number, None)

    def run(self, most: int = 100_000) -> None:
        """Until everything has ended."""
        for _ in range(most):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError(f"still running: {self.scheduler.stats()}")

    def answer(self, tokens: NDArray[np.int32], max_tokens: int = 4, **options: Any) -> int:
        """Run one request to its end; the number of its cached tokens."""
        number = self.add(tokens, max_tokens, **options)
        self.run()
        return self.cached[number]

    def idle(self, seconds: float) -> None:
        """Time passes; copies complete."""
        until = self.now + seconds
        while self.now < until and (self.copies or self.scheduler.plan(self.now) is not None):
            self.step()
        self.now = max(self.now, until)
