"""What a model file lists: declarations of steps.

A declaration says which weights a step has, on which mesh axis and under which placements it runs, and makes
the step once the weights are there. Sharding of activations and of weights follow from the same lines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from quickturn.layers import attention, embedding, linear, norm
from quickturn.layers.linear import LinearWeight
from quickturn.layers.rotary import Rotary
from quickturn.parallel.placement import Axis, Partial, Placement, Replicate, Shard, Step
from quickturn.parallel.weights import Segment, WeightSpec

Parameter = torch.Tensor | LinearWeight


@dataclass(frozen=True)
class Materials:
    """What steps are made of: loaded parameters by name, and the cos/sin tables of the model's rotary
    embeddings.
    """

    parameters: Mapping[str, Parameter]
    rotary: Mapping[Rotary, torch.Tensor]

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter `name`, which is a plain tensor."""
        parameter = self.parameters[name]
        assert isinstance(parameter, torch.Tensor), name
        return parameter

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

    def weights(self) -> tuple[WeightSpec, ...]:
        """The parameters of this step."""

    def step(self, materials: Materials) -> Step:
        """The step, holding its parameters."""


@dataclass(frozen=True)
class Embed:
    """Token ids to vectors. Whole on every rank: a lookup costs nothing and needs no collective."""

    name: str
    vocab: int
    hidden: int

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[V, H]`."""
        segments = (Segment(f"{self.name}.weight", self.vocab),)
        return (WeightSpec(f"{self.name}.weight", segments, self.hidden, "table", "vocab", Replicate()),)

    def step(self, materials: Materials) -> Step:
        """Ids `[T]` to the residual stream `[T, H]`."""
        run = embedding.Embedding(materials.parameters[f"{self.name}.weight"])
        return Step(self.name, "vocab", Replicate(), Replicate(), run, "begin")


@dataclass(frozen=True)
class Norm:
    """RMS norm; with `adds`, of the residual stream after its input was added to it. On the axis of what
    follows.
    """

    name: str
    hidden: int
    eps: float
    axis: Axis
    adds: bool = True

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[H]`."""
        segments = (Segment(f"{self.name}.weight", self.hidden),)
        return (WeightSpec(f"{self.name}.weight", segments, None, "vector", self.axis, Replicate()),)

    def step(self, materials: Materials) -> Step:
        """`[T, H] -> [T, H]`."""
        weight = materials.tensor(f"{self.name}.weight")
        if self.adds:
            run = norm.AddNorm(weight, self.eps)
            return Step(self.name, self.axis, Replicate(), Replicate(), run, "add_norm")
        return Step(self.name, self.axis, Replicate(), Replicate(), norm.Norm(weight, self.eps))


@dataclass(frozen=True)
class Part:
    """One of the matrices fused into a column-parallel linear: checkpoint module, output rows, rows that stay
    together.
    """

    module: str
    rows: int
    unit: int = 1


@dataclass(frozen=True)
class Column:
    """A linear map whose output features are shared out: Replicate to Shard(-1)."""

    name: str
    axis: Axis
    columns: int
    parts: tuple[Part, ...]
    bias: bool = False

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[sum of rows, columns]`, and `bias` `[sum of rows]`."""
        return _linear_weights(self.name, self.axis, self.columns, self.parts, self.bias, Shard(0), Shard(0))

    def step(self, materials: Materials) -> Step:
        """`[T, K] -> [T, N]`."""
        return Step(self.name, self.axis, Replicate(), Shard(-1), _linear(self.name, self.bias, materials))


@dataclass(frozen=True)
class GatedColumn:
    """`silu(gate) * up` of two linear maps of one input, their outputs shared out alike: Replicate to
    Shard(-1).
    """

    name: str
    axis: Axis
    columns: int
    gate: Part
    up: Part
    bias: bool = False

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[2 I, columns]`, the gate's rows first, and `bias` `[2 I]`."""
        parts = (self.gate, self.up)
        return _linear_weights(self.name, self.axis, self.columns, parts, self.bias, Shard(0), Shard(0))

    def step(self, materials: Materials) -> Step:
        """`[T, K] -> [T, I]`."""
        map = _linear(self.name, self.bias, materials)
        return Step(self.name, self.axis, Replicate(), Shard(-1), linear.GatedLinear(map.weight, map.bias))


@dataclass(frozen=True)
class Row:
    """A linear map whose input features are shared out: Shard(-1) to Partial."""

    name: str
    axis: Axis
    columns: int
    rows: int
    bias: bool = False

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[rows, columns]`, and `bias` `[rows]`."""
        parts = (Part(self.name, self.rows),)
        return _linear_weights(self.name, self.axis, self.columns, parts, self.bias, Shard(1), Partial())

    def step(self, materials: Materials) -> Step:
        """`[T, K] -> [T, N]`."""
        return Step(self.name, self.axis, Shard(-1), Partial(), _linear(self.name, self.bias, materials))


@dataclass(frozen=True)
class Attend:
    """Attention of decoder layer `layer` over its cache, heads shared out. `norm` names q and k norm modules,
    if any.
    """

    name: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    window: int = 0
    norms: tuple[str, str] | None = None
    eps: float = 1e-6

    def weights(self) -> tuple[WeightSpec, ...]:
        """Norm weights `[D]`, the same for every head."""
        return tuple(
            WeightSpec(
                f"{name}.weight",
                (Segment(f"{name}.weight", self.head_dim),),
                None,
                "vector",
                "attn",
                Replicate(),
            )
            for name in self.norms or ()
        )

    def step(self, materials: Materials) -> Step:
        """Fused `q|k|v` `[T, (Hq + 2 Hkv) D] -> [T, Hq D]`."""
        q_norm, k_norm = (
            (materials.tensor(f"{name}.weight") for name in self.norms) if self.norms else (None, None)
        )
        run = attention.Attention(
            layer=self.layer,
            head_dim=self.head_dim,
            queries_per_kv=self.heads // self.kv_heads,
            scale=self.head_dim**-0.5,
            cos_sin=materials.rotary[self.rotary],
            window=self.window,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
        )
        return Step(self.name, "attn", Shard(-1), Shard(-1), run)


@dataclass(frozen=True)
class Head:
    """Hidden states to logits, the vocabulary shared out. `tensor` is the checkpoint's: the embedding's own
    if tied.
    """

    name: str
    vocab: int
    hidden: int
    tensor: str

    def weights(self) -> tuple[WeightSpec, ...]:
        """`weight` `[V, H]`."""
        segments = (Segment(self.tensor, self.vocab),)
        return (WeightSpec(f"{self.name}.weight", segments, self.hidden, "linear", "vocab", Shard(0)),)

    def step(self, materials: Materials) -> Step:
        """`[S, H] -> float32 [S, V]`."""
        run = linear.Head(materials.matrix(f"{self.name}.weight"))
        return Step(self.name, "vocab", Replicate(), Shard(-1), run)


def _linear_weights(
    name: str,
    axis: Axis,
    columns: int,
    parts: tuple[Part, ...],
    bias: bool,
    weight_placement: Placement,
    bias_placement: Placement,
) -> tuple[WeightSpec, ...]:
    def segments(suffix: str) -> tuple[Segment, ...]:
        return tuple(Segment(f"{part.module}.{suffix}", part.rows, part.unit) for part in parts)

    weight = WeightSpec(f"{name}.weight", segments("weight"), columns, "linear", axis, weight_placement)
    if not bias:
        return (weight,)
    return weight, WeightSpec(f"{name}.bias", segments("bias"), None, "vector", axis, bias_placement)


def _linear(name: str, bias: bool, materials: Materials) -> linear.Linear:
    return linear.Linear(
        materials.matrix(f"{name}.weight"), materials.tensor(f"{name}.bias") if bias else None
    )
