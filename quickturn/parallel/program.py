"""A compiled model: what each rank does, in order, as plain data.

Where activations `[tokens, features]` lie is a `Layout`. Tokens: `span` neighbouring ranks have the same
ones. Attention's span is the ranks of one group of requests; a smaller one means that those ranks have shared
out the group's tokens, a larger one that tokens of several groups were put together. Features: whole, in
parts or as summands over `over` neighbouring ranks, of the `span` that they divide.
"""

from dataclasses import dataclass
from typing import Literal

from quickturn.parallel.mesh import Groups, Mesh
from quickturn.parallel.placement import Partial, Placement, Replicate, Shard

WHOLE = Replicate()


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies: the ranks that share its tokens, and how it is placed on `over` of them."""

    span: int
    placement: Placement = WHOLE
    over: int = 1

    def __str__(self) -> str:
        """As `explain` prints it: `whole | 4` of a tensor that every four ranks hold."""
        match self.placement:
            case Replicate():
                what = "whole"
            case Shard():
                what = f"1/{self.over}"
            case Partial():
                what = f"sum of {self.over}"
        return f"{what} | {self.span}"


MoveKind = Literal[
    "slice_tokens",
    "slice_features",
    "all_reduce",
    "all_gather_tokens",
    "all_gather_features",
    "reduce_scatter_tokens",
    "reduce_scatter_features",
    "all_to_all_to_tokens",
    "all_to_all_to_features",
]
"""Slices are local; `all_to_all_to_tokens` turns parts of features into parts of tokens."""

FusedKind = Literal["all_reduce_add_norm", "reduce_scatter_add_norm"]


@dataclass(frozen=True)
class RunStep:
    """Runs step number `step` on activations that lie as `layout` says."""

    step: int
    layout: Layout


@dataclass(frozen=True)
class Move:
    """Moves the activations, or the residual stream, from one layout to another."""

    kind: MoveKind
    tensor: Literal["x", "residual"]
    over: Groups
    before: Layout
    after: Layout


@dataclass(frozen=True)
class Fused:
    """A move of the activations and the `add_norm` step behind it as one."""

    kind: FusedKind
    step: int
    over: Groups
    before: Layout
    after: Layout


@dataclass(frozen=True)
class Dispatch:
    """Runs a mixture of experts on tokens that are shared out: each travels over `over` to the ranks that
    have one of its experts, and what they make of it comes back and is summed where the token is.
    """

    step: int
    over: Groups
    before: Layout
    after: Layout


@dataclass(frozen=True)
class Select:
    """Keeps the sampled tokens only, of activations and residual stream; both are in attention's span."""


Instruction = RunStep | Move | Fused | Dispatch | Select


@dataclass(frozen=True)
class Program:
    """Instructions for every rank of `mesh`, chosen for steps of about `tokens` tokens in a group of
    requests.

    `seconds`: what the cost model predicts for one such step.
    """

    mesh: Mesh
    tokens: int
    instructions: tuple[Instruction, ...]
    seconds: float

    def groups(self) -> tuple[Groups, ...]:
        """The groups of ranks that its collectives run over."""
        found = (
            instruction.over
            for instruction in self.instructions
            if isinstance(instruction, Fused | Dispatch)
            or (isinstance(instruction, Move) and not instruction.kind.startswith("slice"))
        )
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Programs:
    """One program for each range of step sizes, ascending: the first whose `tokens` reach the step's runs it,
    else the last.
    """

    programs: tuple[Program, ...]

    @property
    def mesh(self) -> Mesh:
        """The ranks that they are for."""
        return self.programs[0].mesh

    @property
    def dispatched(self) -> frozenset[int]:
        """The steps that any of them runs as `Dispatch`."""
        found = (one for program in self.programs for one in program.instructions)
        return frozenset(one.step for one in found if isinstance(one, Dispatch))

    @property
    def moves(self) -> bool:
        """Whether ranks say anything to each other."""
        return self.mesh.world > 1

    def choose(self, tokens: int) -> int:
        """Index of the program for steps whose largest group has so many tokens."""
        fitting = (index for index, program in enumerate(self.programs) if tokens <= program.tokens)
        return next(fitting, len(self.programs) - 1)

    def groups(self) -> tuple[Groups, ...]:
        """The groups of ranks that their collectives run over."""
        found = (groups for program in self.programs for groups in program.groups())
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Rows:
    """How many tokens lie where, in one step: `own` are those of each group of requests.

    Outside attention's span a group's tokens are filled up with rows of zeros until its ranks can share them
    out equally; each rank then has a unit of its own, and `span` ranks hold the units of all of them.
    """

    mesh: Mesh
    own: tuple[int, ...]

    def unit(self, rank: int) -> int:
        """Rows of the unit of `rank`."""
        span = self.mesh.attention_span
        return -(-self.own[rank // span] // span)

    def at(self, span: int, rank: int) -> int:
        """Rows that `rank` holds of a tensor that lies in `span`, filled up."""
        first = rank // span * span
        return sum(self.unit(other) for other in range(first, first + span))

    def held(self, span: int, rank: int) -> int:
        """Rows that `rank` holds of a tensor that lies in `span`: in attention's own, its tokens alone."""
        own = self.mesh.attention_span
        return self.own[rank // own] if span == own else self.at(span, rank)
