"""Long steps now and then, where pieces of prompts cost many times what their tokens cost in a large step."""

from random import Random
from typing import Any

import numpy as np
import pytest
import quickturn_control as qc
from control_clocks import RECORDED, Beside, Clock, mixture, noisy, recorded_gpu
from control_sim import FULL, STATE, Sim, prompt

TPS = 70.0


def machine(clock: Clock, seed: int, **policy: Any) -> Sim:
    """A server that has answered one long prompt to nobody else."""
    noise = noisy(clock, Random(seed), 0.01, stalls=0.0)
    sim = Sim(
        2000,
        [FULL, STATE],
        seconds=noise,
        max_step_tokens=8192,
        recorded=RECORDED,
        policy=qc.Policy(min_tps_per_user=TPS, **policy),
    )
    sim.answer(prompt(9000, seed), 1)
    return sim


def pauses(sim: Sim) -> int:
    """How many there were so far."""
    return int(dict(sim.scheduler.stats())["pauses"])


def test_pauses_bring_a_long_prompt_on_and_the_promise_holds(noise_seed: int) -> None:
    """Faster than pieces, the reader faster, too, and one gap in a hundred longer."""
    by_pieces = Beside(machine(mixture, noise_seed), 512, 30000, noise_seed)
    sim = machine(mixture, noise_seed, max_pause=0.15)
    beside = Beside(sim, 512, 30000, noise_seed)
    assert pauses(sim) >= 3
    assert beside.first_token < by_pieces.first_token / 3
    assert beside.gaps.mean() < by_pieces.gaps.mean()
    assert beside.gaps.max() <= 1.25 * 0.15  # guessed from prompts alone
    assert 1 / beside.gaps.mean() >= TPS


def test_a_pause_is_as_seldom_as_was_said(noise_seed: int) -> None:
    """Users come and go, prompts of all lengths wait all the time: every answer has its tokens a second, and
    of gaps no more are long than one in so many and what was saved up, or is given when nobody decodes.
    """
    random = Random(noise_seed)
    every = random.choice([16, 40, 128])
    sim = machine(mixture, noise_seed, max_pause=random.choice([0.15, 0.25, 0.4]), pause_every=every)
    before = pauses(sim)
    late = steps = lulls = 0
    asked: list[int] = []
    while len(asked) < 60 or sim.scheduler.has_unfinished():
        if len(asked) < 60 and len(asked) - len(sim.ended) < 12:
            tokens = prompt(random.choice([300, 900, 6000, 30000]), random.randrange(1 << 30))
            asked.append(sim.add(tokens, random.choice([150, 500])))
        at = sim.now
        plan = sim.step()
        if plan is not None and plan.num_decode_rows:
            steps += 1
            late += sim.now - at > 1.15 / TPS
        elif plan is not None and plan.num_rows:
            lulls += 1
        sim.plans.clear()
    answers = [np.diff(sim.token_times[number]) for number in asked]
    speeds = np.array([1 / gaps.mean() for gaps in answers])
    assert pauses(sim) - before <= steps / every + 3 + lulls
    assert late <= steps / every + 3 + lulls + 8  # the first of their kind were not known
    assert (speeds >= TPS).mean() >= 0.95, np.sort(speeds)[:5]


def test_no_pauses_where_pieces_are_as_good(noise_seed: int) -> None:
    """A dense model's pieces cost what their tokens cost."""
    sim = machine(recorded_gpu(RECORDED), noise_seed, max_pause=0.15)
    Beside(sim, 512, 20000, noise_seed)
    assert pauses(sim) == 0


def test_no_pauses_unless_allowed(noise_seed: int) -> None:
    """And a negative length is refused."""
    sim = machine(mixture, noise_seed)
    beside = Beside(sim, 512, 3000, noise_seed)
    assert pauses(sim) == 0
    assert np.quantile(beside.gaps, 0.95) <= 1.3 / TPS
    with pytest.raises(ValueError, match="must not be negative"):
        machine(mixture, noise_seed, max_pause=-1.0)


@pytest.mark.parametrize("every", [16, 128])
def test_nobody_starves_where_no_pause_is_short_enough(noise_seed: int, every: int) -> None:
    """Decoding leaves so little that no long step could be made up for: pieces come as without pauses."""
    readers = 16

    def promised(rows: int) -> float:
        return 1 / (1.01 * (9.0e-3 + 1.25e-4 * (rows - 16) + 5e-9 * rows * 6000))

    noise = noisy(mixture, Random(noise_seed), 0.002, stalls=0.0)
    policy = qc.Policy(min_tps_per_user=promised(readers + 3), max_pause=0.15, pause_every=every)
    sim = Sim(4000, [FULL, STATE], seconds=noise, max_step_tokens=8192, recorded=RECORDED, policy=policy)
    sim.answer(prompt(9000, noise_seed), 1)
    for reader in range(readers):
        sim.add(prompt(300, noise_seed + 1 + reader), 6000)
    while len([times for times in sim.token_times.values() if len(times) > 20]) < readers:
        sim.step()
    newcomer = sim.add(prompt(600, noise_seed + 99))
    for _ in range(3000):
        sim.step()
        if newcomer in sim.token_times:
            return
    raise AssertionError(f"no first token after 3,000 steps: {sim.scheduler.stats()}")
