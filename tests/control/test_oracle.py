"""The control plane under random operations, beside an oracle that knows what every cache position means.

`QUICKTURN_ORACLE_OPS` sets how many operations the two tests make together.
"""

import os
from random import Random

import pytest
from control_driver import Driver, Setup
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

OPERATIONS = int(os.environ.get("QUICKTURN_ORACLE_OPS", "200000"))
FULL, STATE, WINDOW = ("full", 3, 0), ("state", 1, 0), ("window", 3, 9)

SETUPS = {
    "full": Setup((FULL,), 12),
    "full, hardly any room": Setup((("full", 2, 0),), 9, max_step_tokens=9),
    "full, no overlap": Setup((FULL,), 12, pipeline_depth=1),
    "full, drafts": Setup((FULL,), 12, draft_tokens=3),
    "full, no prefix cache": Setup((FULL,), 12, prefix_cache=False),
    "full, a promise": Setup((FULL,), 12, min_tps=300.0),
    "hybrid": Setup((("full", 4, 0), STATE), 16),
    "hybrid, no overlap": Setup((("full", 4, 0), STATE), 16, pipeline_depth=1),
    "hybrid, drafts": Setup((("full", 4, 0), STATE), 16, draft_tokens=2),
    "hybrid, no prefix cache": Setup((("full", 4, 0), STATE), 16, prefix_cache=False),
    "two full groups and a state": Setup((("full", 4, 0), ("full", 2, 0), STATE), 24),
    "full and window": Setup((FULL, WINDOW), 16),
    "window only": Setup((("window", 2, 6),), 14),
    "state only": Setup((("state", 2, 0),), 8),
    "all kinds": Setup((("full", 4, 0), ("window", 4, 10), ("state", 2, 0)), 20),
    "all kinds, drafts": Setup((("full", 4, 0), ("window", 4, 10), ("state", 2, 0)), 20, draft_tokens=3),
    "full, host": Setup((FULL,), 12, tiers=((30,),)),
    "full, host and store": Setup((FULL,), 12, tiers=((20,), (40,))),
    "hybrid, small host and store": Setup((("full", 2, 0), STATE), 14, tiers=((6, 2), (9, 3))),
    "all kinds, host": Setup((("full", 4, 0), ("window", 4, 10), STATE), 20, tiers=((60, 20, 10),)),
    "window only, host": Setup((("window", 2, 6),), 14, tiers=((10,),)),
    "state only, host": Setup((("state", 2, 0),), 8, tiers=((8,),)),
}


@pytest.mark.parametrize("name", SETUPS)
def test_busy_server(name: str) -> None:
    """Long runs in the proportions of a busy server; two schedulers agree; at the end nothing is left."""
    operations = OPERATIONS * 3 // 4 // len(SETUPS)
    length = 3000
    for number in range(max(1, operations // length)):
        seed = f"{name} {number}"
        print(f"seed {seed!r}")
        driver = Driver(SETUPS[name], Random(seed))
        for _ in range(length):
            driver.any_operation()
        driver.drain()
        assert driver.ended > 120


class Machine(RuleBasedStateMachine):
    """Operations chosen by hypothesis, which then looks for the shortest sequence that fails."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), seed=st.integers(0, 2**32))
    def start(self, name: str, seed: int) -> None:
        """A fresh scheduler of some kind."""
        self.driver = Driver(SETUPS[name], Random(seed), twin=seed % 2 == 0)

    @rule()
    def add(self) -> None:
        """A request."""
        if len(self.driver.device.tracks) < 14:
            self.driver.add()

    @rule(times=st.integers(1, 8))
    def run(self, times: int) -> None:
        """Some steps as the engine's loop makes them, with one step out."""
        for _ in range(times):
            self.driver.plan()
            if len(self.driver.device.flights) == 2:
                self.driver.apply()

    @rule()
    def plan(self) -> None:
        """A plan."""
        self.driver.plan()

    @rule()
    def apply(self) -> None:
        """A result."""
        self.driver.apply()

    @rule()
    def stop_one(self) -> None:
        """A cancel or a stop string."""
        self.driver.stop_one()

    @rule()
    def transfers(self) -> None:
        """Copies complete in any order."""
        self.driver.transfers()

    @rule()
    def match(self) -> None:
        """The joint match against brute force."""
        self.driver.match()

    @rule()
    def hold(self) -> None:
        """A tool call."""
        self.driver.hold()

    @rule()
    def reset(self) -> None:
        """The cache is emptied."""
        self.driver.reset()

    @invariant()
    def sound(self) -> None:
        """Every invariant, after every operation."""
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        """Everything ends, nothing leaks."""
        if hasattr(self, "driver"):
            self.driver.drain()


def test_state_machine() -> None:
    """The same operations as a hypothesis state machine."""
    steps = 50
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=max(10, OPERATIONS // 4 // steps),
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,  # more operations are other ones, too
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
