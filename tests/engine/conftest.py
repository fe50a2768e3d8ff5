"""Engines on tiny random checkpoints."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from driving import DEVICES, Checkpoint, Checkpoints
from tiny import OPTIONS, random_checkpoint
from transformers import PreTrainedModel


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are no faster on two threads, and far slower if the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """`saved(option)`: the random checkpoint of an entry of `OPTIONS`, made once."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def make(option: str) -> tuple[Path, PreTrainedModel]:
        if option not in made:
            reference = random_checkpoint(*OPTIONS[option])
            directory = tmp_path_factory.mktemp(option)
            reference.save_pretrained(directory)
            made[option] = directory, reference
        return made[option]

    return make


@pytest.fixture(params=DEVICES)
def checkpoints(
    saved: Callable[[str], tuple[Path, PreTrainedModel]], request: pytest.FixtureRequest
) -> Checkpoints:
    """`checkpoints(option)`: that checkpoint, for engines on each device of this machine in turn."""
    return lambda option: Checkpoint(*saved(option), request.param)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator whose seed is printed, so that a failure can be repeated."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)
