"""The time of a step may be told after the step was settled."""

import numpy as np
import pytest
import quickturn_control as qc


def scheduler() -> qc.Scheduler:
    config = qc.SchedulerConfig(
        groups=[qc.GroupConfig("full", 16)],
        num_slabs=64,
        block_tokens=4,
        max_step_tokens=512,
        policy=qc.Policy(min_tps_per_user=100),
    )
    return qc.Scheduler(config)


def run(late: bool) -> list[tuple[int, int]]:
    """Rows and tokens of steps of which each takes 1 ms and 0.1 ms a token."""
    made = scheduler()
    for id, length in enumerate((9, 300, 200, 400), 1):
        made.add(qc.Request(id, np.arange(length, dtype=np.int32) + 1000 * id, max_tokens=30))
    seen = []
    now = 0.0
    while (plan := made.plan(now)) is not None and plan.num_rows:
        took = 1e-3 + 1e-4 * plan.num_tokens
        now += took
        seen.append((plan.num_rows, plan.num_tokens))
        tokens = np.full(plan.num_samples, 7, dtype=np.int32)
        made.apply(qc.StepResult(plan.step, tokens, elapsed_us=0.0 if late else took * 1e6))
        if late:
            made.timed(plan.step, took * 1e6)
    return seen


def test_a_time_told_later_is_learned_as_well() -> None:
    assert run(late=True) == run(late=False)
    assert max(tokens for _, tokens in run(late=True)[1:]) < 300, "the promise held nothing back"


def test_only_late_steps_have_no_time() -> None:
    made = scheduler()
    made.add(qc.Request(1, np.arange(8, dtype=np.int32), max_tokens=12))
    steps = []
    for elapsed in (*[0.0] * 9, 5.0):
        plan = made.plan(0.0)
        assert plan is not None
        steps.append(plan.step)
        made.apply(qc.StepResult(plan.step, np.full(plan.num_samples, 7, dtype=np.int32), elapsed_us=elapsed))
    for step in (steps[0], steps[-1], 99):
        with pytest.raises(ValueError, match=f"step {step} isn't one"):
            made.timed(step, 10.0)
    made.timed(steps[8], 10.0)
    made.timed(steps[1], 10.0)
    with pytest.raises(ValueError, match="isn't one"):
        made.timed(steps[1], 10.0)
