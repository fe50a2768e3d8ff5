"""Who comes next when many wait: prompts by turns, and starts only as far as the promise holds."""

from random import Random

import numpy as np
import pytest
import quickturn_control as qc
from control_agents import Sessions, large_mixture, run_agents
from control_clocks import noisy
from control_sim import FULL, Sim, prompt

TPS = 70.0


def crowded(plan: qc.StepPlan) -> float:
    """Each decoding row adds 0.8 ms to 2: more than 15 break a promise of 70 tokens/s."""
    return 2e-3 + 0.8e-3 * plan.num_decode_rows + 2e-5 * (plan.num_tokens - plan.num_decode_rows)


@pytest.mark.parametrize("fresh", [False, True])
def test_many_who_come_at_once_begin_as_the_promise_holds(seed: int, fresh: bool) -> None:
    """What so many rows take was never measured when they come. Nobody is slower than promised, and those who
    wait for others to end are told.
    """
    random = Random(seed)
    clock = noisy(crowded, random, 0.005, stalls=0.0)
    sim = Sim(400, [FULL], clock, max_step_tokens=4096, policy=qc.Policy(min_tps_per_user=TPS))
    if not fresh:
        sim.answer(prompt(500, seed), 4)
    users = [sim.add(prompt(random.randint(50, 1500), seed + 1 + n), 300) for n in range(40)]
    held = rows = 0
    while sim.scheduler.has_unfinished():
        plan = sim.step()
        assert plan is not None
        rows = max(rows, plan.num_decode_rows)
        held = max(held, int(dict(sim.scheduler.stats())["prompts_held_by_promise"]))
    assert 12 <= rows <= 15
    assert held >= 5
    assert min(1 / np.diff(sim.token_times[user]).mean() for user in users) >= TPS


def test_who_is_promised_more_than_one_alone_gets_is_answered_in_the_end() -> None:
    sim = Sim(400, [FULL], crowded, policy=qc.Policy(min_tps_per_user=1000.0))
    users = [sim.add(prompt(300, n), 20) for n in range(5)]
    sim.run()
    assert set(users) <= set(sim.ended)


@pytest.mark.parametrize("slow_after_it", [False, True])
def test_what_two_rows_once_took_by_accident_keeps_nobody_out_for_good(
    seed: int, slow_after_it: bool
) -> None:
    """All their steps had a compile in them, or the last of them came while the machine was ten times slower:
    one after the other, users would never find out that two take hardly longer than one.
    """
    random = Random(seed)
    slow = 1.0

    def seconds(plan: qc.StepPlan) -> float:
        rows = plan.num_decode_rows
        took = 9e-3 + 3e-4 * rows + 2e-5 * (plan.num_tokens - rows)
        return took * (slow if rows > 1 or slow_after_it else 1.0)

    clock = noisy(seconds, random, 0.005, stalls=0.0)
    sim = Sim(400, [FULL], clock, max_step_tokens=600, policy=qc.Policy(min_tps_per_user=TPS))
    sim.answer(prompt(500, seed), 1)
    sim.add(prompt(100, seed + 1), 400)
    for _ in range(60):
        sim.step()
    slow = 1.0 if slow_after_it else 30.0
    other = sim.add(prompt(100, seed + 2), 100 if slow_after_it else random.choice([2, 100]))
    for _ in range(60 if slow_after_it else 0):
        sim.step()
    slow = 10.0 if slow_after_it else slow
    while other not in sim.ended:
        sim.step()
    for _ in range(30 if slow_after_it else 0):
        sim.step()
    slow = 1.0
    sim.run()
    rows: list[int] = []
    for number in range(8):
        sim.add(prompt(100, seed + 3 + number), 200)
    while sim.scheduler.has_unfinished():
        plan = sim.step()
        rows += [plan.num_decode_rows] if plan is not None else []
    assert max(rows) >= 4
    assert len(rows) < 1000


def test_answers_of_one_token_need_nobodys_end(seed: int) -> None:
    """They never decode, so that the promise has nothing against them while others do."""
    sim = Sim(400, [FULL], crowded, policy=qc.Policy(min_tps_per_user=1 / 3.5e-3))
    reader = sim.add(prompt(300, seed), 400)
    while len(sim.token_times.get(reader, [])) < 20:
        sim.step()
    scored = sim.add(prompt(200, seed + 1), 1)
    talks = sim.add(prompt(200, seed + 2), 5)
    while scored not in sim.ended:
        sim.step()
    assert reader not in sim.ended
    assert talks not in sim.token_times
    sim.run()
    assert talks in sim.ended


@pytest.mark.parametrize("users", [4, 10])
def test_a_sessions_next_turn_does_not_wait_for_cold_prompts(seed: int, users: int) -> None:
    """Nor do cold prompts for them: of each step's prompt tokens they have half at least."""
    policy = qc.Policy(min_tps_per_user=TPS, max_pause=0.15)
    got = run_agents(large_mixture(seed, policy), Sessions(users), seed)
    assert np.quantile(got.later, 0.9) < 1.0 < np.median(got.first)
    assert got.speeds.min() >= TPS
    alone = run_agents(large_mixture(seed, policy), Sessions(users, turns=1), seed)
    assert got.first.max() < 2.2 * alone.first.max()


def test_prompts_that_are_much_alike_keep_their_order(seed: int) -> None:
    """That of the queue, where of those who come together the shortest is the first."""
    random = Random(seed)
    sim = Sim(400, [FULL], crowded, max_step_tokens=512)
    lengths = {
        sim.add(prompt(length, seed + length), 1): length for length in random.sample(range(6000, 11_000), 5)
    }
    sim.run()
    assert sorted(lengths, key=lambda number: sim.token_times[number]) == sorted(
        lengths, key=lengths.__getitem__
    )


def test_nobody_passes_who_is_more_important(seed: int) -> None:
    sim = Sim(400, [FULL], crowded, max_step_tokens=256)
    important = sim.add(prompt(9000, seed), 1, priority=1)
    short = sim.add(prompt(100, seed + 1), 1)
    sim.run()
    assert sim.token_times[important] <= sim.token_times[short]


def test_of_places_that_come_free_every_second_is_the_firsts(seed: int) -> None:
    """Users with short prompts keep coming; one with a long prompt gets its place all the same."""
    sim = Sim(2000, [FULL], crowded, max_step_tokens=4096, policy=qc.Policy(min_tps_per_user=TPS))
    sim.answer(prompt(500, seed), 4)
    count = 0

    def come() -> None:
        nonlocal count
        count += 1
        sim.add(prompt(200, seed + count), 150)

    for _ in range(30):
        come()
    for _ in range(100):
        sim.step()
    long = sim.add(prompt(20_000, seed - 1), 20)
    for _ in range(6000):
        before = len(sim.ended)
        sim.step()
        for _ in range(len(sim.ended) - before):
            come()
        sim.plans.clear()
        if long in sim.token_times:
            return
    raise AssertionError(f"no first token after 6,000 steps: {sim.scheduler.stats()}")


@pytest.mark.parametrize("number", [1, 12, 16])
def test_a_machine_that_got_ten_times_faster_is_found_out(number: int) -> None:
    """What was learned while it was slow left nothing to expect of few rows: of nothing, nothing followed."""
    random = Random(number)
    slow = 1.0

    def seconds(plan: qc.StepPlan) -> float:
        rows = plan.num_decode_rows
        return slow * (2e-3 + 4.5e-4 * rows + 2e-5 * (plan.num_tokens - rows))

    sim = Sim(400, [FULL], seconds, max_step_tokens=1024, policy=qc.Policy(min_tps_per_user=TPS))
    sim.answer(prompt(300, number), 4)
    for step in range(1600):
        slow = 10.0 if 500 <= step < 900 else 1.0
        if len(sim.slot_of) < 40 and random.random() < 0.5:
            tokens = prompt(random.choice([20, 300, 2000]), random.randrange(1 << 20))
            sim.add(tokens, random.choice([1, 2, 30, 200]))
        plan = sim.step()
        if step >= 1400 and plan is not None and plan.num_rows:
            assert sim.scheduler.stats()["step_us_predicted"] > 0
