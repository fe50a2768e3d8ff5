"""Tiny random checkpoints to validate."""

from collections.abc import Callable
from pathlib import Path

import pytest
from threads import one_thread as one_thread
from tiny import random_checkpoints


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(option)`: the directory of the random checkpoint of an entry of `OPTIONS`, made once."""
    make = random_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    return lambda option: make(option)[0]
