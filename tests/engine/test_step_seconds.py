"""What a step is said to have taken where two are in flight, on a device whose clock is a number."""

import time
from typing import Any

import pytest
import torch

from quickturn.execution.runner import PendingStep


class Event:
    """Happened at `at` seconds by the device's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        """It has."""

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds, as torch gives them."""
        return 1e3 * (later.at - self.at)


def seconds(launched_ago: float, launching: float, before: float | None, done: float) -> float:
    """Of a step that was launched so long ago and took so long to launch, between two events."""
    events: list[Any] = [Event(done), None if before is None else Event(before)]
    pending = PendingStep(torch.zeros(0), list, 0.0, events[0], None, events[1])
    pending._started = time.perf_counter() - launched_ago
    pending._launching = launching
    return pending.wait().seconds


def test_a_step_is_not_charged_for_launching_the_next() -> None:
    """Done after 4 ms; the host looks after 900, because the next one took so long to launch."""
    assert seconds(0.9, 0.001, 10.0, 10.004) == pytest.approx(0.004)


def test_launching_counts_for_the_step_that_is_launched() -> None:
    """A step whose kernels are done as soon as they are launched takes what launching them takes."""
    assert seconds(0.9, 0.8, 10.0, 10.004) == 0.8


def test_an_idle_device_is_not_a_slow_one() -> None:
    """An hour after the step before, or before any: from the launch on."""
    assert 0.5 <= seconds(0.5, 0.001, 10.0, 3610.0) < 100
    assert 0.5 <= seconds(0.5, 0.001, None, 3610.0) < 100


def test_waiting_for_the_step_before_is_not_launching() -> None:
    """A grammar's masks need the tokens of the step before, so that launching waits for them."""
    pending = PendingStep(torch.zeros(0), list, time.perf_counter() - 100.0, None, waited=99.0)
    assert 1.0 <= pending.wait().seconds < 90
