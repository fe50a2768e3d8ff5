"""Nobody starves and nothing hangs, whatever steps take: the policy on clocks that mean it ill."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
import quickturn_control as qc
from control_clocks import Beside, Clock
from control_sim import Sim, prompt

STARVED = 8
"""Every so many steps with decoding rows, one has prompt tokens."""
RUNS = 100


def mixed(plan: qc.StepPlan) -> bool:
    """Prompts beside decoding rows."""
    return 0 < plan.num_decode_rows < plan.num_rows


def clocks(random: Random) -> dict[str, Clock]:
    """Seconds of a step, by what is bad about them."""
    turn = 0
    change = random.randrange(20, 200)
    factor = random.choice([0.01, 100.0])

    def count(then: Callable[[int, qc.StepPlan], float]) -> Clock:
        def seconds(plan: qc.StepPlan) -> float:
            nonlocal turn
            turn += 1
            return then(turn, plan)

        return seconds

    def cost(plan: qc.StepPlan) -> float:
        return 0.004 + 1e-4 * (plan.num_tokens - plan.num_decode_rows)

    return {
        "none": lambda _: 0.0,
        "constant": lambda _: 0.01,
        "huge": lambda _: 1e5,
        "alternating": count(lambda i, _: 1e-6 if i % 2 else 10.0),
        "another from now on": count(lambda i, plan: cost(plan) * (factor if i > change else 1.0)),
        "bursts": count(lambda i, plan: cost(plan) * (50.0 if i // 10 % 3 == 0 else 1.0)),
        "cheaper with prompts": lambda plan: 0.02 / (1 + plan.num_tokens - plan.num_decode_rows),
        "a floor": lambda plan: 0.011 if mixed(plan) else 0.0044,
        "prompts only": lambda plan: 5.0 * (plan.num_rows - plan.num_decode_rows),
        "any": lambda _: 10.0 ** random.uniform(-6, 3),
        "slower and slower": count(lambda i, _: 1e-4 * 1.05 ** min(i, 400)),
    }


@dataclass
class Run:
    """One random server and what is asked of it, watched plan by plan."""

    seed: int
    clock: str = ""
    made: str = ""
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each request: prompt tokens, answer tokens."""
    prefilling: set[int] = field(default_factory=set)
    starved: int = 0

    def __post_init__(self) -> None:
        """Draws all of it."""
        self.random = random = Random(self.seed)
        every = clocks(random)
        self.clock = random.choice(sorted(every))
        block = random.choice([4, 16, 64])
        requests = random.choice([2, 5, 20])
        most = random.choice([requests + 1, requests + 5, 64, 512, 8192])
        self.longest = random.choice([30, 400, 20_000]) if most >= 512 else random.choice([30, 400])
        policy = {
            "min_tps_per_user": random.choice([0.0, 1.0, 30.0, 1000.0]),
            "max_ttft": random.choice([0.0, 0.0, 1e-6, 1e6]),
            "max_gap_factor": random.choice([2.0, 2.0, 1.0, 0.0]),
        }
        # From room for little more than the longest request, so that some give way, to room for all.
        self.answers = random.choice([3, 60])
        slabs = math.ceil((self.longest + self.answers + block) / block * random.choice([1.2, 3, 20])) + 2
        self.made = (
            f"{self.clock}: block {block}, {requests} requests, {most} tokens, {slabs} slabs, {policy}"
        )
        recorded = random.sample([(rows, 2**k) for rows in (1, 2, 7) for k in range(4, 10)], 6)
        self.sim = Sim(
            slabs,
            [qc.GroupConfig("full", 1)],
            every[self.clock],
            block_tokens=block,
            max_requests=requests,
            max_step_tokens=most,
            prefix_cache=random.random() < 0.5,
            recorded=random.choice([[], recorded]),
            policy=qc.Policy(**policy),
        )
        self.least = min(most - requests, 8)

    def add(self) -> None:
        """One more request."""
        length = self.random.choice([1, self.random.randint(1, 30), self.random.randint(1, self.longest)])
        answer = self.random.randint(1, self.answers)
        number = self.sim.add(prompt(length, self.random.randrange(1 << 20)), answer)
        self.asked[number] = length, answer

    def step(self) -> None:
        """One plan. Something runs in it, and prompts aren't forgotten for long."""
        room = self.room()
        plan = self.sim.step()
        assert plan is not None, f"nothing runs: {self.sim.scheduler.stats()}"
        # One that gives way may leave its cache to the next plan.
        busy = plan.num_rows or len(plan.released.ids) or not self.sim.scheduler.has_unfinished()
        assert busy, "a plan without rows"
        self.prefilling |= set(plan.admitted.ids.tolist())
        self.prefilling -= set(plan.released.ids.tolist()) | set(self.sim.ended)
        self.prefilling -= {number for number in self.sim.token_times if number in self.prefilling}
        decodes_alone = plan.num_rows == plan.num_decode_rows
        # A prompt that waits for cache is held up by the pool, not by the promise: of what was left before
        # the plan, decoding rows may need a block each. One that may not end yet is held up by the users
        # before it.
        room = min(room, self.room())
        waits = len(self.prefilling) > self.sim.scheduler.stats()["prompts_held_by_promise"]
        starves = decodes_alone and waits and room > plan.num_decode_rows
        self.starved = self.starved + 1 if starves else 0
        assert self.starved < STARVED, "prompts starve"

    def room(self) -> float:
        """Blocks that nobody needs."""
        stats = self.sim.scheduler.stats()
        return stats["slabs_free"] + stats["blocks_evictable"]

    def all(self) -> None:
        """Requests come and go while others run; then the rest ends in time."""
        for _ in range(self.random.randint(1, 12)):
            self.add()
            for _ in range(self.random.choice([0, 1, 10, 50])):
                if self.sim.scheduler.has_unfinished():
                    self.step()
            if self.random.random() < 0.2 and self.asked:
                self.sim.scheduler.cancel(self.random.choice(sorted(self.asked)))
        left = self.bound()
        while self.sim.scheduler.has_unfinished():
            self.step()
            left -= 1
            assert left > 0, f"it doesn't end: {self.sim.scheduler.stats()}"
        self.sim.step()  # tells who was cancelled last
        assert set(self.sim.ended) == set(self.asked)

    def bound(self) -> int:
        """Steps, if the least piece of a prompt comes every eight, and all answers come one after the other;
        what gives way is computed again.
        """
        pieces = sum(math.ceil(tokens / self.least) for tokens, _ in self.asked.values())
        answers = sum(answer for _, answer in self.asked.values())
        again = 1 + max((answer for _, answer in self.asked.values()), default=0)
        return STARVED * (pieces * again + answers) + 100


def test_everyone_gets_on(seed: int) -> None:
    """Whatever the clock, the promise and the room."""
    for turn in range(RUNS):
        run = Run(seed + turn)
        print(f"run {turn}, seed {seed + turn}: {run.made}")
        run.all()


def host_floor(stall: Callable[[int], bool], noise: Callable[[], float] = lambda: 1.0) -> Clock:
    """A GPU whose steps with prompts are launched kernel by kernel: 11 ms for anything up to 260 tokens, and
    4.4 for decoding. Those for whose number `stall` holds take 20.
    """
    number = 0

    def seconds(plan: qc.StepPlan) -> float:
        nonlocal number
        if not mixed(plan):
            return 1e-3 * max(4.4, plan.num_tokens / 26) * noise()
        number += 1
        return 1e-3 * max(20.0 if stall(number) else 11.0, 1 + plan.num_tokens / 26) * noise()

    return seconds


def newcomer(clock: Clock) -> Beside:
    """36,000 tokens beside a reader of 4,094, on a server that has answered one prompt alone."""
    sim = Sim(2000, [qc.GroupConfig("full", 1)], clock, max_step_tokens=8192)
    sim.answer(prompt(4094, 0), 1)
    return Beside(sim, 4094, 36_000)


def grew(beside: Beside) -> bool:
    """Whether pieces came to where more tokens begin to cost, within so many of them."""
    pieces = [tokens for tokens in beside.chunks if tokens]
    return max(pieces[:60]) >= 200


@pytest.mark.parametrize("stalled", [(), (1,), (3,), (2, 3), (5, 11, 24, 25, 28), tuple(range(10, 20))])
def test_pieces_grow_where_more_cost_the_same(stalled: tuple[int, ...]) -> None:
    """Also if the first ones that were tried took long by accident."""
    beside = newcomer(host_floor(stalled.__contains__))
    assert grew(beside)
    # One such piece every eight steps, which is what anyone gets whom the promise leaves nothing.
    assert beside.first_token <= 36_000 / 250 * (11.0 + 7 * 4.4) * 1e-3


def test_pieces_grow_through_noise(noise_seed: int) -> None:
    """One step in twenty takes twice as long, all are off by 3%."""
    random = Random(noise_seed)
    beside = newcomer(host_floor(lambda _: random.random() < 0.05, lambda: math.exp(random.gauss(0, 0.03))))
    assert grew(beside)
    assert beside.first_token <= 36_000 / 250 * (11.0 + 7 * 4.4) * 1e-3
    assert np.mean(beside.gaps) <= 2 * 4.4e-3 * 1.1


def test_decode_steps_without_a_time_starve_nobody() -> None:
    """Ranks that don't measure, or a clock too coarse: what decoding takes is never known."""
    sim = Sim(200, [qc.GroupConfig("full", 1)], lambda plan: 0.1 * (plan.num_rows - plan.num_decode_rows))
    sim.add(prompt(100, 1), 1 << 20)
    for _ in range(20):
        sim.step()
    number = sim.add(prompt(1000, 2), 1)
    for _ in range(STARVED * (1000 // 8)):
        sim.step()
    assert number in sim.token_times
