"""Engines on tiny random checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from driving import Driver
from tiny import OPTIONS, random_checkpoint
from transformers import PreTrainedModel

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore


@dataclass(frozen=True)
class Checkpoint:
    """A saved random model and its transformers twin."""

    path: Path
    reference: PreTrainedModel

    def driver(self, **options: object) -> Driver:
        """A fresh float32 engine on it; `options` override the configuration."""
        chosen: dict[str, object] = {
            "dtype": "float32",
            "device": "cpu",
            "memory": 8 << 20,
            "block_tokens": 4,
            "max_requests": 8,
            "max_step_tokens": 64,
        } | options
        return Driver(EngineCore(EngineConfig(str(self.path), **chosen)))  # type: ignore[arg-type]


Checkpoints = Callable[[str], Checkpoint]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoints(option)`: the random model of an entry of `OPTIONS`, made once."""
    made: dict[str, Checkpoint] = {}

    def make(option: str) -> Checkpoint:
        if option not in made:
            reference = random_checkpoint(*OPTIONS[option])
            directory = tmp_path_factory.mktemp(option)
            reference.save_pretrained(directory)
            made[option] = Checkpoint(directory, reference)
        return made[option]

    return make


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator whose seed is printed, so that a failure can be repeated."""
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)
