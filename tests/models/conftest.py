"""Pairs of a transformers model and ours."""

from collections.abc import Callable

import pytest
from threads import one_thread as one_thread
from tiny import OPTIONS, load, random_checkpoint
from transformers import PreTrainedModel

from quickturn.models.base import Model

Pair = Callable[[str], tuple[PreTrainedModel, Model]]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """`pair(option)`: the transformers model and ours, loaded from the checkpoint that it saved."""
    made: dict[str, tuple[PreTrainedModel, Model]] = {}

    def make(option: str) -> tuple[PreTrainedModel, Model]:
        if option not in made:
            reference = random_checkpoint(*OPTIONS[option])
            directory = tmp_path_factory.mktemp(option)
            reference.save_pretrained(directory)
            made[option] = reference, load(directory)
        return made[option]

    return make
