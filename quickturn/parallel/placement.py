"""Where a tensor lies on a mesh axis, and the steps of a layer that say so.

A model lists the steps of its decoder layer. Each step names the mesh axis of its module kind and the placement that its input
must have and its output will have. Models never call a collective: whoever runs the layer compares neighbours and moves data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quickturn.layers.forward import ForwardBatch

Axis = Literal["attn", "dense", "moe", "vocab"]


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


@dataclass(frozen=True)
class Step:
    """One step of a decoder layer.

    `run(x, batch) -> y` maps the activations `[tokens, features]` of this step. `residual` says how the step treats the residual
    stream: `add_norm` steps take the branch output, add it to the stream and return the normed stream; `none` ignores it.
    """

    name: str
    axis: Axis
    consumes: Placement
    produces: Placement
    run: Callable[[torch.Tensor, ForwardBatch], torch.Tensor]
