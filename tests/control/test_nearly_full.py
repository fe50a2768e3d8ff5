"""Caches with room for hardly more than one request: what was accepted ends, whatever is cached."""

from random import Random

import pytest
import quickturn_control as qc
from control_driver import Driver, Setup
from control_sim import UNIT, Sim, prompt

FULL, STATE = qc.GroupConfig("full", 1), qc.GroupConfig("state", 1)
RUNS = 150


def test_a_cached_state_gives_way_to_the_prompt_that_needs_its_room() -> None:
    """Nine blocks and a state fill ten slabs; the checkpoint that the prompt would start from is one more."""
    sim = Sim(10, [FULL, STATE])
    tokens = prompt(8 * UNIT + 5, 1)
    sim.answer(tokens[: 4 * UNIT + 5], 2)
    behind = [sim.add(tokens, 2), sim.add(prompt(100, 2), 2)]
    sim.run(200)
    assert [len(sim.token_times[number]) for number in behind] == [2, 2]
    sim.scheduler.check()


@pytest.mark.parametrize("slabs", [9, 12, 15])
@pytest.mark.parametrize("hybrid", [False, True])
def test_what_lies_below_needs_its_room_once(slabs: int, hybrid: bool) -> None:
    """A prompt whose prefix is on the host alone fits where it fits cold, and isn't computed again."""
    groups = [FULL, STATE] if hybrid else [FULL]
    slabs += 2 * hybrid
    sim = Sim(
        slabs,
        groups,
        tiers=[qc.TierConfig("host", [100] * len(groups))],
        policy=qc.Policy(demote_below=1.0, checkpoint_tail=0),
    )
    tokens = prompt(8 * UNIT + 5, 1)
    for first in (tokens, prompt((slabs - len(groups) - 1) * UNIT + 1, 2)):
        sim.answer(first, 2)
        for _ in range(40):
            sim.step()  # copies go down
    number = sim.add(tokens, 2)
    sim.run(200)
    assert sim.cached[number] == 8 * UNIT


@pytest.mark.parametrize("window", [8, 12, 16, 24])
@pytest.mark.parametrize("per", [2, 3, 5])
def test_windows_move_through_the_least_cache_that_is_taken(per: int, window: int) -> None:
    """Blocks of a window begin anywhere in a slab: no prompt is taken that gets stuck on the way."""
    groups = [qc.GroupConfig("full", 2), qc.GroupConfig("window", per, window=window)]
    for length in range(20, 120, 11):
        for most in (2, 3, 7, 64):
            for slabs in range(3, 80):
                sim = Sim(slabs, groups, block_tokens=4, max_step_tokens=most, max_requests=1)
                try:
                    number = sim.add(prompt(length, 1), 2)
                except ValueError:
                    continue  # it can't fit
                sim.run(400)
                assert len(sim.token_times[number]) == 2, (length, most, slabs)
                break


def test_blocks_of_a_window_keep_together() -> None:
    """A context's blocks come free together only if they lie together."""
    groups = [qc.GroupConfig("window", 8, window=16 * UNIT)]
    sim = Sim(100, groups, max_step_tokens=UNIT)
    sim.add(prompt(12 * UNIT, 1), 4)
    while sim.scheduler.stats()["requests_decoding"] < 1:
        sim.step()
    assert sim.scheduler.stats()["group_0_slabs"] == 2


def small(random: Random) -> Setup:
    """Some groups in few slabs."""
    full, state = ("full", random.choice([1, 2, 3, 4]), 0), ("state", random.choice([1, 1, 2]), 0)
    window = ("window", random.choice([1, 2, 3, 5]), random.choice([2, 4, 9, 16]))
    groups = random.choice(
        [(full,), (full, state), (full, window), (full, state, state), (full, state, window)]
    )
    requests = random.choice([1, 2, 3, 5])
    tiers = random.choice([(), (), (tuple(random.choice([0, 6, 60]) for _ in groups),)])
    return Setup(
        groups,
        random.choice([len(groups) + 1, 6, 8, 12]),
        block_tokens=random.choice([1, 2, 4, 8]),
        max_requests=requests,
        max_step_tokens=requests + random.choice([0, 1, 7, 30]),
        pipeline_depth=random.choice([1, 2]),
        tiers=tiers,
        prefix_cache=random.random() < 0.9,
        stride=random.choice([0, 4, 16]),
        min_tps=random.choice([0.0, 1.0, 300.0]),
        max_pause=random.choice([0.0, 0.01]),
        recorded=random.choice([(), ((1, 8), (4, 8), (1, 16), (4, 16))]),
    )


def test_everyone_ends_in_a_small_cache(seed: int) -> None:
    """Random requests beside the device oracle; then nothing new comes, and everybody ends."""
    for turn in range(RUNS):
        random = Random(seed + turn)
        setup = small(random)
        print(f"run {turn}, seed {seed + turn}: {setup}")
        driver = Driver(setup, random, twin=False)
        for _ in range(400):
            driver.any_operation()
        driver.drain()


def test_an_answer_longer_than_the_cache_ends() -> None:
    """One that gave way knows more tokens by now than an empty cache has room for: its answer is over. Seldom
    met, so that the seed was searched for.
    """
    setup = Setup((("full", 1, 0), ("window", 4, 12)), 10, block_tokens=1, max_requests=2, max_step_tokens=3)
    driver = Driver(setup, Random("longer 2905"), twin=False)
    for _ in range(300):
        driver.any_operation()
    driver.drain()
