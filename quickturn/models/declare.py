"""What a model file lists: declarations of steps.

A declaration says which weights a step has, on which mesh axis and under which placements it runs, and makes
the step once the weights are there. Sharding of activations and of weights follow from the same lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from quickturn.layers import embedding, linear, norm
from quickturn.layers.context import Gather
from quickturn.layers.linear import LinearWeight
from quickturn.layers.rotary import Rotary
from quickturn.parallel.placement import Axis, Partial, Placed, Placement, Replicate, Shard, Step
from quickturn.parallel.weights import Cut, Segment, WeightSpec

Parameter = torch.Tensor | LinearWeight

NormKind = Literal["plain", "wide", "offset"]
"""`plain`: multiplied as stored, after rounding to the activations' dtype. `wide`: multiplied in float32.
`offset`: in float32, too, and one is added to what is stored."""


@dataclass(frozen=True)
class Materials:
    """What steps are made of: loaded parameters by name, the cos/sin tables of the model's rotary embeddings,
    and what brings together the parts of a cache whose tokens are shared out, if they are.
    """

    parameters: Mapping[str, Parameter]
    rotary: Mapping[Rotary, torch.Tensor]
    gather: Gather | None = None

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter `name`, which is a plain tensor."""
        parameter = self.parameters[name]
        assert isinstance(parameter, torch.Tensor), name
        return parameter

    def scale(self, name: str) -> torch.Tensor | None:
        """The scales of the stack `name`, if it is in 8-bit floats."""
        return self.tensor(f"{name}.scale") if f"{name}.scale" in self.parameters else None

    def matrix(self, name: str) -> LinearWeight:
        """The parameter `name`, which is laid out for a linear map."""
        parameter = self.parameters[name]
        assert not isinstance(parameter, torch.Tensor), name
        return parameter


class Declaration(Protocol):
    """A step to be."""

    @property
    def name(self) -> str:
        """Name of the step, unique in the model."""

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""

    def weights(self) -> tuple[WeightSpec, ...]:
        """The parameters of this step."""

    def step(self, materials: Materials) -> Step:
        """The step, holding its parameters."""


@dataclass(frozen=True)
class Embed:
    """Token ids to vectors, times `scale` in the table's dtype. Whole on every rank: a lookup costs nothing
    and needs no collective.
    """

    name: str
    vocab: int
    hidden: int
    scale: float = 1.0

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, "vocab", Replicate(), Replicate(), "begin")

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[V, H]`."""
        segments = (Segment(f"{self.name}.weight", self.vocab),)
        return (WeightSpec(f"{self.name}.weight", segments, self.hidden, "table", "vocab", Replicate()),)

    def step(self, materials: Materials) -> Step:
        """Ids `[T]` to the residual stream `[T, H]`."""
        table = materials.parameters[f"{self.name}.weight"]
        scale = float(torch.tensor(self.scale, dtype=table.dtype))
        return self.placed.step(embedding.Embedding(table, scale))


@dataclass(frozen=True)
class Norm:
    """RMS norm; with `adds`, of the residual stream after its input was added to it. On the axis of what
    follows. `kind` says how its weight is stored and multiplied.
    """

    name: str
    hidden: int
    eps: float
    axis: Axis
    adds: bool = True
    kind: NormKind = "plain"

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, self.axis, Replicate(), Replicate(), "add_norm" if self.adds else "none")

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[H]`."""
        return (norm_weight(self.name, self.hidden, self.axis, self.kind),)

    def step(self, materials: Materials) -> Step:
        """`[T, H] -> [T, H]`."""
        weight = materials.tensor(f"{self.name}.weight")
        kind = norm.AddNorm if self.adds else norm.Norm
        return self.placed.step(kind(weight, self.eps))


@dataclass(frozen=True)
class Part:
    """One of the matrices fused into a column-parallel linear: checkpoint module, output rows, rows that stay
    together; `repeats`: see `Segment`. With `group`, the matrix is part of a larger one in the checkpoint,
    which has `groups` times `group` rows: an equal share of each group, from its row `start`.
    """

    module: str
    rows: int
    unit: int = 1
    start: int = 0
    group: int = 0
    groups: int = 1
    repeats: bool = False

    def segment(self, suffix: str, columns: int | None) -> Segment:
        """Where the rows of parameter `suffix` come from."""
        name = f"{self.module}.{suffix}"
        if not self.group:
            return Segment(name, self.rows, self.unit, repeats=self.repeats)
        width = () if columns is None else (columns,)
        taken = (self.start, self.start + self.rows // self.groups, 1)
        at = ((0, self.groups, 1), taken, *((0, size, 1) for size in width))
        cut = Cut((self.groups * self.group, *width), (self.groups, self.group, *width), at)
        return Segment(name, self.rows, self.unit, cut, self.repeats)


@dataclass(frozen=True)
class Column:
    """A linear map whose output features are shared out: Replicate to Shard(-1)."""

    name: str
    axis: Axis
    columns: int
    parts: tuple[Part, ...]
    bias: bool = False

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, self.axis, Replicate(), Shard(-1))

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[sum of rows, columns]`, and `bias` `[sum of rows]`."""
        return linear_weights(self.name, self.axis, self.columns, self.parts, self.bias, Shard(0), Shard(0))

    def step(self, materials: Materials) -> Step:
        """`[T, K] -> [T, N]`."""
        return self.placed.step(_linear(self.name, self.bias, materials))


@dataclass(frozen=True)
class GatedColumn:
    """`activation(gate) * up` of two linear maps of one input, their outputs shared out alike: Replicate to
    Shard(-1).
    """

    name: str
    axis: Axis
    columns: int
    gate: Part
    up: Part
    bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, self.axis, Replicate(), Shard(-1))

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[2 I, columns]`, the gate's rows first, and `bias` `[2 I]`."""
        parts = (self.gate, self.up)
        return linear_weights(self.name, self.axis, self.columns, parts, self.bias, Shard(0), Shard(0))

    def step(self, materials: Materials) -> Step:
        """`[T, K] -> [T, I]`."""
        map = _linear(self.name, self.bias, materials)
        kind = linear.GatedLinear if self.activation == "silu" else linear.GeluGatedLinear
        return self.placed.step(kind(map.weight, map.bias))


@dataclass(frozen=True)
class Row:
    """A linear map whose input features are shared out: Shard(-1) to Partial."""

    name: str
    axis: Axis
    columns: int
    rows: int
    bias: bool = False

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, self.axis, Shard(-1), Partial())

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[rows, columns]`, and `bias` `[rows]`."""
        parts = (Part(self.name, self.rows),)
        return linear_weights(self.name, self.axis, self.columns, parts, self.bias, Shard(1), Partial())

    def step(self, materials: Materials) -> Step:
        """`[T, K] -> [T, N]`."""
        return self.placed.step(_linear(self.name, self.bias, materials))


@dataclass(frozen=True)
class Head:
    """Hidden states to logits, the vocabulary shared out. `tensor` is the checkpoint's: the embedding's own
    if tied. `softcap` squashes the logits, 0 for not.
    """

    name: str
    vocab: int
    hidden: int
    tensor: str
    softcap: float = 0.0

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, "vocab", Replicate(), Shard(-1))

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[V, H]`."""
        segments = (Segment(self.tensor, self.vocab),)
        return (WeightSpec(f"{self.name}.weight", segments, self.hidden, "linear", "vocab", Shard(0)),)

    def step(self, materials: Materials) -> Step:
        """`[S, H] -> float32 [S, V]`."""
        return self.placed.step(linear.Head(materials.matrix(f"{self.name}.weight"), self.softcap))


def norm_weight(name: str, size: int, axis: Axis, kind: NormKind = "plain") -> WeightSpec:
    """`weight` `[size]` of the norm module `name`."""
    tensor = f"{name}.weight"
    offset = 1.0 if kind == "offset" else 0.0
    segments = (Segment(tensor, size),)
    return WeightSpec(
        tensor, segments, None, "vector", axis, Replicate(), wide=kind != "plain", offset=offset
    )


def linear_weights(
    name: str,
    axis: Axis,
    columns: int,
    parts: tuple[Part, ...],
    bias: bool,
    weight_placement: Placement,
    bias_placement: Placement,
) -> tuple[WeightSpec, ...]:
    """Weight, and bias if there is one, of matrices with one input fused into one."""
    weight = WeightSpec(
        f"{name}.weight",
        tuple(part.segment("weight", columns) for part in parts),
        columns,
        "linear",
        axis,
        weight_placement,
    )
    if not bias:
        return (weight,)
    segments = tuple(part.segment("bias", None) for part in parts)
    return weight, WeightSpec(f"{name}.bias", segments, None, "vector", axis, bias_placement)


def _linear(name: str, bias: bool, materials: Materials) -> linear.Linear:
    return linear.Linear(
        materials.matrix(f"{name}.weight"), materials.tensor(f"{name}.bias") if bias else None
    )
