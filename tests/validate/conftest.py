"""Tiny random checkpoints to validate."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny import OPTIONS, random_checkpoint


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are no faster on two threads, and far slower if the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model(option)`: the directory of the random checkpoint of an entry of `OPTIONS`, made once."""
    made: dict[str, Path] = {}

    def make(option: str) -> Path:
        if option not in made:
            made[option] = tmp_path_factory.mktemp(option)
            random_checkpoint(*OPTIONS[option]).save_pretrained(made[option])
        return made[option]

    return make
