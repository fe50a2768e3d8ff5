"""Engines on tiny random checkpoints."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from driving import DEVICES, Checkpoint, Checkpoints
from threads import one_thread as one_thread
from tiny import random_checkpoints
from transformers import PreTrainedModel


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """`saved(option)`: the random checkpoint of an entry of `OPTIONS`, made once."""
    return random_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=DEVICES)
def checkpoints(
    saved: Callable[[str], tuple[Path, PreTrainedModel]], request: pytest.FixtureRequest
) -> Checkpoints:
    """`checkpoints(option)`: that checkpoint, for engines on each device of this machine in turn."""
    return lambda option: Checkpoint(*saved(option), request.param)


@pytest.fixture
def checkpoint(checkpoints: Checkpoints, family: str) -> Checkpoint:
    """The checkpoint of a family, for engines on the GPU."""
    one = checkpoints(family)
    if one.device != "cuda":
        pytest.skip("the same again")
    return one


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator whose seed is printed, so that a failure can be repeated."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)
