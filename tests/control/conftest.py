"""Fixtures of the control plane's tests."""

import secrets

import pytest


@pytest.fixture
def seed() -> int:
    """Printed, so that a failure can be repeated."""
    value = secrets.randbits(32)
    print(f"seed {value}")
    return value
