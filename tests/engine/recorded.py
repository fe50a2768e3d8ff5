"""Graphs without a GPU: recorded steps that run eagerly. As a program, a rank of an engine that has them."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quickturn.execution import graphs, scoring
from quickturn.execution.recording import Forward

BY_HOST = "TEST_COLLECTIVES_BY_HOST"
"""Set: collectives copy tensors to the host, as between ranks that share a GPU."""
SCORED_AT_ONCE = 5
"""Tokens of a slice, of the tiny vocabulary."""


@dataclass
class Eager:
    """Takes a recorded step's place: runs it anew at every replay."""

    forward: Forward
    logits: torch.Tensor
    tokens: torch.Tensor
    replays: int = 0

    def replay(self, arrays: Sequence[NDArray[np.integer]]) -> None:
        inputs = tuple(torch.from_numpy(np.array(array)).to(self.logits.device) for array in arrays)
        self.logits, self.tokens = self.forward(inputs)
        self.replays += 1


def eagerly(
    forward: Forward, arrays: Sequence[NDArray[np.integer]], device: torch.device, pool: Any
) -> Eager:
    step = Eager(forward, torch.empty(0, device=device), torch.empty(0))
    step.replay(arrays)
    return step


def record_eagerly(patch: pytest.MonkeyPatch) -> None:
    """Recorded steps run eagerly."""
    patch.setattr(graphs, "record", eagerly)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Engines of this process record steps, and score prompts a few tokens at a time."""
    from tiny import TINY

    from quickturn.engine import start
    from quickturn.parallel import communicator

    record_eagerly(patch)
    if BY_HOST in os.environ:
        patch.setattr(communicator, "_on_gpu", lambda x: True)
    patch.setattr(start, "GRAPH_DEVICES", ("cpu",))
    patch.setattr(scoring, "SLICE_BYTES", 4 * TINY["vocab_size"] * SCORED_AT_ONCE)


def all_ranks_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Also those that this process starts."""
    from quickturn.engine import crew

    as_on_a_gpu(patch)
    patch.setattr(crew, "FOLLOWER", (str(Path(__file__)),))
    patch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))


if __name__ == "__main__":
    from quickturn.engine.follower import main

    as_on_a_gpu(pytest.MonkeyPatch())
    main()
