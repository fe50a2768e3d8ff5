"""What every model is: a declared architecture, and the program of steps made from it and its weights."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from quickturn.cache.layout import AnyGroup, CacheGroup, StateGroup
from quickturn.layers.forward import ForwardBatch
from quickturn.layers.rotary import Rotary, cos_sin_table
from quickturn.models.declare import Declaration, Embed, Head, Materials, Norm, Parameter
from quickturn.models.experts import Mix
from quickturn.models.mixers import Attend, Delta
from quickturn.parallel import walk
from quickturn.parallel.collectives import Collectives, gathering
from quickturn.parallel.few_rows import FewRows, fuse_few_rows
from quickturn.parallel.fuse import FusedDecode, fuse_decode
from quickturn.parallel.placement import Run, Step, conversions
from quickturn.parallel.program import Programs
from quickturn.parallel.shards import Place
from quickturn.parallel.weights import WeightSpec


@dataclass(frozen=True)
class Architecture:
    """A decoder-only model as its file declares it; no tensor in it.

    `max_positions` is the longest context the checkpoint is meant for, in tokens. `prefixes` are (in the
    checkpoint, here) of tensor names, `ignored` the prefixes of checkpoint tensors that nothing here needs.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    embed: Embed
    layers: tuple[tuple[Declaration, ...], ...]
    norm: Norm
    head: Head
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def declarations(self) -> tuple[Declaration, ...]:
        """Every step in the order of execution."""
        inner = (declaration for layer in self.layers for declaration in layer)
        return (self.embed, *inner, self.norm, self.head)

    def dispatching(self, steps: Collection[int]) -> "Architecture":
        """The same, ready to let the tokens of these mixtures travel, by their indexes among the steps."""
        names = {step.name for index, step in enumerate(self.declarations()) if index in steps}

        def ready(declaration: Declaration) -> Declaration:
            if isinstance(declaration, Mix) and declaration.name in names:
                return replace(declaration, dispatched=True)
            return declaration

        return replace(self, layers=tuple(tuple(ready(each) for each in layer) for layer in self.layers))

    def on(self, place: Place) -> "Architecture":
        """What the rank at `place` runs: fewer heads and experts. What it holds is `local_weights` of these
        weights. Raises PlacementError for what can't be shared out so.
        """
        last = len(self.layers) - 1

        def share(declaration: Declaration, layer: int) -> Declaration:
            match declaration:
                case Attend() | Delta():
                    return declaration.on(place)
                case Mix():
                    return declaration.on(place, tail=layer == last)
            return declaration

        layers = (tuple(share(each, i) for each in layer) for i, layer in enumerate(self.layers))
        return replace(self, layers=tuple(layers))

    def weights(self) -> tuple[WeightSpec, ...]:
        """Every parameter."""
        return tuple(spec for declaration in self.declarations() for spec in declaration.weights())

    def attention(self) -> tuple[Attend, ...]:
        """The attention of each decoder layer."""
        return tuple(step for layer in self.layers for step in layer if isinstance(step, Attend))

    def recurrent(self) -> tuple[Delta, ...]:
        """The linear attention of the decoder layers that have it."""
        return tuple(step for layer in self.layers for step in layer if isinstance(step, Delta))

    def mixtures(self) -> tuple[Mix, ...]:
        """The mixtures of experts."""
        return tuple(step for layer in self.layers for step in layer if isinstance(step, Mix))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding's table."""
        return self.head.tensor == f"{self.embed.name}.weight"

    def cache_groups(self) -> tuple[AnyGroup, ...]:
        """Layers grouped by cache shape and lifetime: full attention first, then windows in the order of
        their first layer, then states.
        """
        members: dict[tuple[int, int, int, int], list[int]] = {}
        for step in self.attention():
            key = step.window, step.kv_heads, step.head_dim, step.parts
            members.setdefault(key, []).append(step.layer)
        keys = sorted(members, key=lambda key: (key[0] > 0, members[key][0]))
        states: dict[tuple[int, int, int, int, int], list[int]] = {}
        for delta in self.recurrent():
            shape = (delta.value_heads, delta.key_dim, delta.value_dim, delta.channels, delta.width)
            states.setdefault(shape, []).append(delta.layer)
        paged = tuple(
            CacheGroup(
                "window" if window else "full",
                tuple(members[window, kv_heads, head_dim, parts]),
                kv_heads,
                head_dim,
                window,
                parts,
            )
            for window, kv_heads, head_dim, parts in keys
        )
        return *paged, *(StateGroup(tuple(layers), *shape) for shape, layers in states.items())


@dataclass(frozen=True)
class Ranks:
    """What one rank of several needs besides its share of a model: the programs that all follow, and how they
    talk to each other.
    """

    programs: Programs
    collectives: Collectives


class Model:
    """A model that can run: the steps of an architecture, holding their weights; on one rank of several, its
    share of them.
    """

    def __init__(
        self,
        architecture: Architecture,
        steps: tuple[Step, ...],
        tail: int,
        fused: FusedDecode | FewRows | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`tail` is the index of the first step that only the sampled tokens need. `fused`: the steps behind
        the first in another form, for the batches that it takes. `ranks`: None for one rank alone.
        """
        self.architecture = architecture
        self.steps = steps
        self._fused = fused
        self._embed: Run = steps[0].run
        self._body: tuple[Run, ...] = tuple(step.run for step in steps[1:tail])
        self._tail: tuple[Run, ...] = tuple(step.run for step in steps[tail:])
        self._ranks = ranks
        self._programs = (
            tuple(walk.ready(program, steps, ranks.collectives) for program in ranks.programs.programs)
            if ranks
            else ()
        )

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return self.architecture.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest context in tokens that the checkpoint is meant for."""
        return self.architecture.max_positions

    def cache_groups(self) -> tuple[AnyGroup, ...]:
        """The cache that the model needs; tables and state rows of a `ForwardBatch` are in this order."""
        return self.architecture.cache_groups()

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Writes the batch's keys and values to the cache and returns float32 logits `[S, V]` of
        `batch.sample_rows`.

        Nothing is read back to the host, so that a CUDA graph can record it. On several ranks all of them
        call it in the same step; each has the whole logits of its group's requests.
        """
        if self._ranks is not None:
            return walk.run(self._programs, self._ranks.programs, batch, self.vocab_size)
        ids = batch.token_ids
        residual = self._embed(ids, ids, batch)
        if self._fused is not None and self._fused.takes(batch):
            return self._fused(residual, batch)
        x = residual
        for run in self._body:
            x = run(x, residual, batch)
        return self._logits(x, residual, batch, batch.sample_rows)

    def forward_scored(
        self, batch: ForwardBatch, slices: Sequence[torch.Tensor], take: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """As `forward`; besides, the logits of each of `slices` (int64 indexes of the batch's tokens) are
        given to `take`, one slice after the other, so that there is never more than one. Where
        groups of ranks have requests of their own, all have as many slices (see `batch.dp_slices`).
        """
        if self._ranks is not None:
            programs = self._ranks.programs
            return walk.run(self._programs, programs, batch, self.vocab_size, slices, take)
        residual = self._embed(batch.token_ids, batch.token_ids, batch)
        x = residual
        for run in self._body:
            x = run(x, residual, batch)
        for rows in slices:
            take(self._logits(x, residual, batch, rows))
        return self._logits(x, residual, batch, batch.sample_rows)

    def _logits(
        self, x: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """What follows the last layer that mixes tokens, for some of them."""
        if rows is not None:
            if rows.shape[0] == 0:
                return torch.empty((0, self.vocab_size), dtype=torch.float32, device=x.device)
            x, residual = x.index_select(0, rows), residual.index_select(0, rows)
        for run in self._tail:
            x = run(x, residual, batch)
        return x


def build(
    architecture: Architecture,
    parameters: Mapping[str, Parameter],
    positions: int,
    device: torch.device,
    ranks: Ranks | None = None,
) -> Model:
    """The model of `architecture` with `parameters` by the names of its weight specs, for contexts up to
    `positions`. With `ranks` both are this rank's share.

    Raises PlacementError if two neighbouring steps don't fit together.
    """
    rotary: dict[Rotary, torch.Tensor] = {}
    for attend in architecture.attention():
        if attend.rotary not in rotary:
            rotary[attend.rotary] = cos_sin_table(attend.rotary, positions, device)
    gather = None
    if ranks is not None:
        gather = gathering(ranks.collectives, ranks.programs.mesh.axis("cp"))
    materials = Materials(parameters, rotary, gather)
    declarations = architecture.declarations()
    steps = tuple(declaration.step(materials) for declaration in declarations)
    conversions(steps)
    several = ranks is not None and ranks.programs.moves
    return Model(
        architecture,
        steps,
        tail_of(declarations),
        None if several else fuse_decode(steps) or fuse_few_rows(steps),
        ranks if several else None,
    )


def tail_of(declarations: Sequence[Declaration]) -> int:
    """Index of the first step that only the sampled tokens need: behind the last that reads other tokens."""
    return 1 + max(i for i, declaration in enumerate(declarations) if declaration.placed.mixes)
