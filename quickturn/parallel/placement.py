"""Where a tensor lies on a mesh axis, and the steps of a layer that say so.

A model lists the steps of its decoder layer. Each step names the mesh axis of its module kind and the
placement that its input must have and its output will have. Models never call a collective: whoever runs the
layer compares neighbours and moves data.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from quickturn.layers.forward import ForwardBatch

Axis = Literal["attn", "dense", "moe", "moe_inner", "vocab"]
"""A kind of modules. `moe`: all ranks share out experts and features; `moe_inner`: those that have the same
experts share out the features."""


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""


@dataclass(frozen=True)
class Shard:
    """Rank i of n holds the i-th of n equal parts along `dim` (negative dims count from the end)."""

    dim: int


@dataclass(frozen=True)
class Partial:
    """Every rank holds a summand; the tensor is their sum."""


Placement = Replicate | Shard | Partial

Run = Callable[[torch.Tensor, torch.Tensor, ForwardBatch], torch.Tensor]

Residual = Literal["none", "begin", "add_norm"]


@dataclass(frozen=True)
class Step:
    """One step of a model.

    `run(x, residual, batch) -> y` maps the activations `[tokens, features]` of this step. `residual` says how
    the step treats the residual stream: a `begin` step's output is the new stream (and the input of the next
    step), an `add_norm` step adds its input to the stream in place and returns the normed stream, `none`
    steps don't look at it.
    """

    name: str
    axis: Axis
    consumes: Placement
    produces: Placement
    run: Run
    residual: Residual = "none"


@dataclass(frozen=True)
class Placed:
    """A step without what it runs: all that matters for moving data.

    `mixes`: it reads other tokens of the request (their cache), so it runs where the request's ranks are; all
    others work token by token.
    """

    name: str
    axis: Axis
    consumes: Placement
    produces: Placement
    residual: Residual = "none"
    mixes: bool = False

    def step(self, run: Run) -> Step:
        """The step that runs `run`."""
        return Step(self.name, self.axis, self.consumes, self.produces, run, self.residual)


Conversion = Literal["none", "slice", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class PlacementError(ValueError):
    """Two neighbouring steps whose placements nothing can convert."""


def conversion(have: Placement, want: Placement) -> Conversion:
    """What turns a tensor placed as `have` into one placed as `want`. Raises PlacementError if nothing does.

    Only a producer can make summands: data that is whole or in parts is never made Partial.
    """
    match have, want:
        case (Replicate(), Replicate()) | (Partial(), Partial()):
            return "none"
        case Replicate(), Shard():
            return "slice"
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case Shard(a), Shard(b):
            return "none" if a == b else "all_to_all"
    raise PlacementError(f"nothing converts {have} to {want}")


def conversions(steps: Sequence[Step]) -> list[Conversion]:
    """The conversion ahead of each step but the first. Raises PlacementError naming the two steps that don't
    fit.
    """
    found: list[Conversion] = []
    for before, after in pairwise(steps):
        try:
            found.append(conversion(before.produces, after.consumes))
        except PlacementError as error:
            message = f"step '{before.name}' is followed by step '{after.name}', but {error}"
            raise PlacementError(message) from error
    return found
