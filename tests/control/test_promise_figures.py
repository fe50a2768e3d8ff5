"""What the scheduler says about its promise: whom it holds back, and how well it knows its steps."""

import pytest
import quickturn_control as qc
from control_sim import FULL, Sim, prompt


def crowded(plan: qc.StepPlan) -> float:
    """Each decoding row adds a millisecond."""
    return 0.002 + 0.001 * plan.num_decode_rows + plan.num_tokens * 1e-6


def test_who_waits_because_of_the_promise() -> None:
    sim = Sim(200, [FULL], seconds=crowded, policy=qc.Policy(min_tps_per_user=50.0))
    for number in range(40):
        sim.add(prompt(300, number), 300)
        sim.step()
        sim.step()
    for _ in range(200):
        sim.step()
    stats = sim.scheduler.stats()
    assert stats["requests_held_by_promise"] == stats["requests_waiting"] == 40 - len(sim.slot_of)
    assert stats["requests_held_by_promise"] > 10
    assert stats["step_us_predicted"] == pytest.approx(stats["step_us_measured"], rel=0.1)
    assert stats["step_us_measured"] == pytest.approx(1e6 * crowded(sim.plans[-1]), rel=0.01)
    sim.run()
    assert sim.scheduler.stats()["requests_held_by_promise"] == 0


def test_waiting_for_a_slot_is_not_the_promise() -> None:
    sim = Sim(200, [FULL], max_requests=4)
    for number in range(10):
        sim.add(prompt(300, number), 300)
    for _ in range(20):
        sim.step()
    stats = sim.scheduler.stats()
    assert stats["requests_waiting"] == 6
    assert stats["requests_held_by_promise"] == 0


def test_one_slow_step_of_two_users_keeps_nobody_out() -> None:
    """A stall in the first step with two rows says nothing about the ones after it."""
    stalled = False

    def seconds(plan: qc.StepPlan) -> float:
        nonlocal stalled
        stalls = plan.num_decode_rows == 2 and not stalled
        stalled = stalled or stalls
        return 1.0 if stalls else 0.01 + 1e-3 * plan.num_decode_rows

    sim = Sim(200, [FULL], seconds=seconds, policy=qc.Policy(min_tps_per_user=30.0))
    sim.add(prompt(100, 0), 1 << 20)
    for number in range(1, 4):
        for _ in range(20):
            sim.step()
        another = sim.add(prompt(100, number), 2)
        for _ in range(40):
            sim.step()
        assert another in sim.ended, "nobody is let in"
    assert stalled
