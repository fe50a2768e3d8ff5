"""The mesh: how the ranks are shared out among what each kind of module splits.

One set of ranks is seen three ways. Attention sees `dp` groups of ranks, each with requests of its own; in a
group, `cp` parts hold different tokens of one cache, and each part splits the heads over `tp` ranks. Dense
feed-forwards see groups of `dense_tp` ranks, mixtures of experts `ep` groups of experts whose inner features
`moe_tp` ranks split. In every view the ranks of tensor parallel are neighbours:

    rank = (dp_index * cp + cp_index) * tp + tp_index
         = dense_group * dense_tp + dense_index
         = ep_index * moe_tp + moe_tp_index
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:  # the server's process validates meshes, too, and has no torch
    from quickturn.parallel.placement import Axis

MeshAxis = Literal["tp", "dp", "cp", "dense_tp", "moe_tp", "ep", "world"]


class MeshError(ValueError):
    """Sizes that make no mesh."""


@dataclass(frozen=True)
class Groups:
    """Ranks in groups of `size`, whose members are `stride` apart: what a collective runs over."""

    size: int
    stride: int = 1

    def index(self, rank: int) -> int:
        """Place of `rank` in its group."""
        return rank // self.stride % self.size

    def members(self, rank: int) -> tuple[int, ...]:
        """The group of `rank`, in order."""
        first = rank - self.index(rank) * self.stride
        return tuple(first + place * self.stride for place in range(self.size))

    def all(self, world: int) -> tuple[tuple[int, ...], ...]:
        """Every group of a world of ranks, each once."""
        return tuple(self.members(rank) for rank in range(world) if self.index(rank) == 0)


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes; `make_mesh` fills in those that aren't given. Raises MeshError if they don't fit
    together.

    `tp`, `dp`, `cp`: attention's, whose product is the world. `dense_tp` divides the world; `moe_tp * ep` is
    the world. The vocabulary is split over attention's `tp`.
    """

    tp: int = 1
    dp: int = 1
    cp: int = 1
    dense_tp: int = 1
    moe_tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "cp", "dense_tp", "moe_tp", "ep"):
            if getattr(self, name) < 1:
                raise MeshError(f"{_flag(name)} {getattr(self, name)}: every size is at least 1")
        attention = f"attention has {self.world} ranks (tp {self.tp} x dp {self.dp} x cp {self.cp})"
        if self.world % self.dense_tp:
            raise MeshError(
                f"{attention}, which --dense-tp {self.dense_tp} doesn't divide; take"
                f" {_divisors(self.world)} for it"
            )
        if self.moe_tp * self.ep != self.world:
            raise MeshError(
                f"{attention}, but the experts have {self.moe_tp * self.ep} (moe-tp {self.moe_tp} x ep"
                f" {self.ep}): both share out the same ranks. Change --tp, --dp or --cp until their product"
                f" is {self.moe_tp * self.ep}, or --moe-tp and --ep until theirs is {self.world}"
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.cp

    @property
    def attention_span(self) -> int:
        """Ranks that have the same requests: those of one data-parallel group."""
        return self.tp * self.cp

    def axis(self, name: MeshAxis) -> Groups:
        """The groups of ranks along an axis."""
        match name:
            case "tp":
                return Groups(self.tp)
            case "cp":
                return Groups(self.cp, self.tp)
            case "dp":
                return Groups(self.dp, self.tp * self.cp)
            case "dense_tp":
                return Groups(self.dense_tp)
            case "moe_tp":
                return Groups(self.moe_tp)
            case "ep":
                return Groups(self.ep, self.moe_tp)
            case "world":
                return Groups(self.world)

    def features(self, axis: "Axis") -> Groups:
        """The ranks over which the steps of a module kind split features (of experts: whole experts, too)."""
        match axis:
            case "attn" | "vocab":
                return Groups(self.tp)
            case "dense":
                return Groups(self.dense_tp)
            case "moe":
                return Groups(self.world)
            case "moe_inner":
                return Groups(self.moe_tp)

    def coordinates(self, rank: int) -> dict[MeshAxis, int]:
        """Place of `rank` along each axis."""
        if not 0 <= rank < self.world:
            raise MeshError(f"rank {rank} is not one of {self.world}")
        return {name: self.axis(name).index(rank) for name in get_args(MeshAxis)}

    def __str__(self) -> str:
        """As the command line has it: `tp 4, ep 4`."""
        shown = [
            f"{name.replace('_', '-')} {getattr(self, name)}"
            for name in ("tp", "dp", "cp", "dense_tp", "moe_tp", "ep")
            if getattr(self, name) > 1
        ]
        return ", ".join(shown) or "one rank"


def make_mesh(
    *,
    tp: int = 1,
    dp: int = 1,
    cp: int = 1,
    dense_tp: int | None = None,
    moe_tp: int | None = None,
    ep: int | None = None,
) -> Mesh:
    """The mesh of the sizes that are given.

    `dense_tp` is the world where there is one group of requests, else the ranks of a group, so that dense
    layers exchange no tokens. `moe_tp` is what `ep` leaves of the world, `ep` what `moe_tp` leaves; with
    neither, experts are split and not shared out. Raises MeshError if the sizes don't fit together.
    """
    for name, size in {
        "tp": tp,
        "dp": dp,
        "cp": cp,
        "dense_tp": dense_tp,
        "moe_tp": moe_tp,
        "ep": ep,
    }.items():
        if size is not None and size < 1:
            raise MeshError(f"{_flag(name)} {size}: every size is at least 1")
    world = tp * dp * cp
    if ep is not None and moe_tp is None and world % ep:
        raise MeshError(
            f"--ep {ep} doesn't divide the {world} ranks of attention (tp {tp} x dp {dp} x cp {cp}): both"
            f" share out the same ranks. Take {_divisors(world)} for --ep, or a --tp, --dp or --cp whose"
            f" product is a multiple of {ep}"
        )
    if moe_tp is not None and ep is None and world % moe_tp:
        raise MeshError(
            f"--moe-tp {moe_tp} doesn't divide the {world} ranks of attention (tp {tp} x dp {dp} x cp {cp});"
            f" take {_divisors(world)} for --moe-tp"
        )
    experts = ep if ep is not None else world // moe_tp if moe_tp is not None else 1
    return Mesh(
        tp=tp,
        dp=dp,
        cp=cp,
        dense_tp=dense_tp if dense_tp is not None else world if dp == 1 else tp * cp,
        moe_tp=moe_tp if moe_tp is not None else world // experts,
        ep=experts,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _divisors(number: int) -> str:
    found = [str(size) for size in range(1, number + 1) if number % size == 0]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
