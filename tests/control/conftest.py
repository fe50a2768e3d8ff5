"""Fixtures of the control plane's tests."""

import secrets

import pytest


@pytest.fixture
def seed() -> int:
    """Printed, so that a failure can be repeated."""
    value = secrets.randbits(32)
    print(f"seed {value}")
    return value


@pytest.fixture(params=range(5))
def noise_seed(request: pytest.FixtureRequest) -> int:
    """Of clocks whose noise is drawn, where a figure is held against a bound. A few seeds, always the same:
    of a thousand others one meets a stall in such a place that a good policy misses the bound.
    """
    value: int = request.param
    return value
