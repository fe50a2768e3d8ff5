"""Declaration of a mixture of experts."""

from dataclasses import dataclass, replace
from typing import Literal

from quickturn.layers import moe
from quickturn.layers.moe import Router, Routing, SharedExpert, prepare_experts
from quickturn.models.declare import Materials, Part, linear_weights
from quickturn.parallel.placement import Axis, Partial, Placed, PlacementError, Replicate, Shard, Step
from quickturn.parallel.shards import Place
from quickturn.parallel.weights import Cut, Segment, WeightSpec

WHOLE = ".whole"
"""In the names of the shared expert's matrices for tokens that travel."""

Range = tuple[int, int, int]
"""Start, stop and step."""

Stored = tuple[tuple[Segment, ...], ...]
"""Segments of a stack of matrices, in each of the ways that a checkpoint may have them."""


@dataclass(frozen=True)
class Shared:
    """The expert that every token takes: its module, its size, and the module of its gate, if it has one."""

    module: str
    intermediate: int
    gate: str


@dataclass(frozen=True)
class Experts:
    """Where the weights of `count` experts lie.

    gate_up: of each expert in turn the gate's rows, then up's, `[E 2I, H]`; down: `[E H, I]`; biases alike,
    or empty. The first of the ways whose tensors are there is taken.
    """

    gate_up: Stored
    down: Stored
    gate_up_bias: Stored = ()
    down_bias: Stored = ()


@dataclass(frozen=True)
class Mix:
    """A mixture of experts: Replicate to Partial, experts and every expert's inner features shared out.

    `first`: the first of the experts that are here, None if all are. `gathered`: its tokens aren't the
    batch's, one for one. `dispatched`: its tokens may travel to their experts; then the shared expert is held
    a second time, shared out by inner features over those ranks alone that have the same tokens then.
    """

    name: str
    router: str
    hidden: int
    intermediate: int
    count: int
    routing: Routing
    experts: Experts
    router_bias: bool = False
    shared: Shared | None = None
    activation: Literal["silu", "gpt_oss"] = "silu"
    first: int | None = None
    gathered: bool = False
    dispatched: bool = False

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, "moe", Replicate(), Partial())

    def weights(self) -> tuple[WeightSpec, ...]:
        """The router's `[E, H]`, the experts' `[E, 2I, H]` and `[E, H, I]`, the shared one's three."""
        found = list(
            linear_weights(
                self.router,
                "moe",
                self.hidden,
                (Part(self.router, self.count),),
                self.router_bias,
                Replicate(),
                Replicate(),
            )
        )
        stored = self.experts
        found.append(self._stack("gate_up", stored.gate_up, self.hidden, Shard(0)))
        found.append(self._stack("down", stored.down, self.intermediate, Shard(1)))
        if stored.gate_up_bias:
            found.append(self._stack("gate_up_bias", stored.gate_up_bias, None, Shard(0)))
            found.append(self._stack("down_bias", stored.down_bias, None, Partial()))
        if self.shared is not None:
            found += self._shared_weights(self.shared)
        if self.shared is not None and self.dispatched:
            found += self._shared_matrices(self.shared, WHOLE, "moe_inner")
        return tuple(found)

    def on(self, place: Place, tail: bool = False) -> "Mix":
        """What the rank at `place` computes: its experts, of the router's choice among all. `tail`: it sees
        only sampled tokens. Raises PlacementError for a number of experts that can't be shared out.
        """
        index, ranks = place.experts()
        if self.count % ranks:
            raise PlacementError(f"{self.name} has {self.count} experts, which {ranks} ranks can't share")
        first = None if ranks == 1 else index * self.count // ranks
        return replace(self, first=first, gathered=place.mesh.dp > 1 or (tail and place.mesh.world > 1))

    def step(self, materials: Materials) -> Step:
        """`[T, H] -> [T, H]`."""
        biased = bool(self.experts.gate_up_bias)
        experts = prepare_experts(
            materials.tensor(f"{self.name}.gate_up"),
            materials.tensor(f"{self.name}.down"),
            gate_up_bias=materials.tensor(f"{self.name}.gate_up_bias") if biased else None,
            down_bias=materials.tensor(f"{self.name}.down_bias") if biased else None,
            activation=self.activation,
            gate_up_scale=materials.scale(f"{self.name}.gate_up"),
            down_scale=materials.scale(f"{self.name}.down"),
        )
        bias = materials.tensor(f"{self.router}.bias") if self.router_bias else None
        router = Router(materials.matrix(f"{self.router}.weight"), self.routing, bias)
        shared = whole = None
        if self.shared is not None:
            shared = self._shared(self.shared, materials, "")
            whole = self._shared(self.shared, materials, WHOLE) if self.dispatched else None
        return self.placed.step(moe.Mixture(router, experts, shared, self.first, self.gathered, whole))

    def _shared(self, shared: Shared, materials: Materials, which: str) -> SharedExpert:
        return SharedExpert(
            materials.matrix(f"{shared.module}.gate_up_proj{which}.weight"),
            materials.matrix(f"{shared.module}.down_proj{which}.weight"),
            materials.tensor(f"{shared.gate}.weight") if shared.gate else None,
        )

    def _stack(
        self, what: str, stored: Stored, columns: int | None, placement: Shard | Partial
    ) -> WeightSpec:
        first, *others = stored
        name = f"{self.name}.{what}"
        return WeightSpec(name, first, columns, "experts", "moe", placement, tuple(others), self.count)

    def _shared_matrices(self, shared: Shared, which: str, axis: Axis) -> tuple[WeightSpec, ...]:
        module, size = shared.module, shared.intermediate
        gate_up = (Part(f"{module}.gate_proj", size), Part(f"{module}.up_proj", size))
        down = (Part(f"{module}.down_proj", self.hidden),)
        up_name, down_name = f"{module}.gate_up_proj{which}", f"{module}.down_proj{which}"
        return (
            *linear_weights(up_name, axis, self.hidden, gate_up, False, Shard(0), Shard(0)),
            *linear_weights(down_name, axis, size, down, False, Shard(1), Partial()),
        )

    def _shared_weights(self, shared: Shared) -> tuple[WeightSpec, ...]:
        found = self._shared_matrices(shared, "", "moe")
        if not shared.gate:
            return found
        tensor = f"{shared.gate}.weight"
        gate = WeightSpec(tensor, (Segment(tensor, 1),), self.hidden, "table", "moe", Replicate())
        return *found, gate


def of_experts(
    tensor: str, shape: tuple[int, ...], parts: tuple[tuple[Range, ...], ...], *, swapped: bool = False
) -> tuple[Segment, ...]:
    """Segments for each expert in turn, cut from one tensor of `shape`, whose first dimension is experts: one
    for each of `parts`, what is taken of the other dimensions.
    """

    def segment(expert: int, part: tuple[Range, ...]) -> Segment:
        rows = range(*part[-1 if swapped else 0])
        return Segment(tensor, len(rows), cut=Cut(shape, shape, ((expert, expert + 1, 1), *part), swapped))

    return tuple(segment(expert, part) for expert in range(shape[0]) for part in parts)


def stored_experts(module: str, count: int, hidden: int, intermediate: int) -> Experts:
    """Experts under `module` as Qwen's checkpoints have them: `gate_up_proj` `[E, 2I, H]` and `down_proj`
    `[E, H, I]`, or three matrices for each expert.
    """
    every, inner = (0, hidden, 1), (0, intermediate, 1)
    gate_up_shape, down_shape = (count, 2 * intermediate, hidden), (count, hidden, intermediate)
    halves = ((inner, every), ((intermediate, 2 * intermediate, 1), every))
    gates_and_ups = tuple(
        Segment(f"{module}.{expert}.{name}.weight", intermediate)
        for expert in range(count)
        for name in ("gate_proj", "up_proj")
    )
    downs = tuple(Segment(f"{module}.{expert}.down_proj.weight", hidden) for expert in range(count))
    return Experts(
        gate_up=(of_experts(f"{module}.gate_up_proj", gate_up_shape, halves), gates_and_ups),
        down=(of_experts(f"{module}.down_proj", down_shape, ((every, inner),)), downs),
    )
