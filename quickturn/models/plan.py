"""A model as the parallel compiler sees it: each declared step's widths and work on a mesh."""

import re
from dataclasses import dataclass, replace
from itertools import accumulate

from quickturn.models.base import Architecture, tail_of
from quickturn.models.declare import Column, Declaration, Embed, GatedColumn, Head, Norm, Row
from quickturn.models.experts import WHOLE, Mix
from quickturn.models.mixers import Attend, Delta
from quickturn.parallel.compile import compile_program, compile_programs
from quickturn.parallel.cost import Load
from quickturn.parallel.explain import Explained, explain
from quickturn.parallel.mesh import Mesh, MeshError
from quickturn.parallel.ops import CacheWork, ExpertWork, Merge, Op, Travel, Work
from quickturn.parallel.placement import Shard
from quickturn.parallel.program import Programs
from quickturn.parallel.weights import Segment, WeightSpec


@dataclass(frozen=True)
class Bytes:
    """Bytes of an element: of activations, of matrices and experts, of the keys and values in the cache."""

    activations: int = 2
    matrices: float = 2.0
    cache: int = 2


def programs_of(architecture: Architecture, mesh: Mesh) -> Programs:
    """What the ranks of `mesh` do to run a model, given whole.

    Raises MeshError for a mesh whose ranks can't share it out, PlacementError for steps that don't fit
    together.
    """
    declarations = architecture.declarations()
    return compile_programs(ops_of(architecture, mesh), tail_of(declarations), mesh)


def explain_model(
    architecture: Architecture, mesh: Mesh, load: Load, sizes: Bytes | None = None
) -> Explained:
    """The program for steps of such a load, explained. Raises as `programs_of` does."""
    ops, tail = ops_of(architecture, mesh, sizes), tail_of(architecture.declarations())
    starts = tuple(accumulate((len(layer) for layer in architecture.layers), initial=1))
    return explain(ops, tail, starts, compile_program(ops, tail, mesh, load), load)


def ops_of(architecture: Architecture, mesh: Mesh, sizes: Bytes | None = None) -> tuple[Op, ...]:
    """Every step, with one rank's share of its work. Raises MeshError for a mesh whose ranks can't share out
    a step, naming it and sizes that would do.
    """
    sizes = sizes or Bytes()
    return tuple(_op(declaration, mesh, sizes) for declaration in architecture.declarations())


def _op(declaration: Declaration, mesh: Mesh, sizes: Bytes) -> Op:
    _check(declaration, mesh)
    specs = declaration.weights()
    weights = sum(_share(spec, mesh, sizes) for spec in specs if spec.use != "experts")
    operations = sum(2 * _rows(spec, mesh) * _columns(spec, mesh) for spec in specs if spec.use == "linear")
    work = Work(weights, operations)
    gives_element, joined, travel = sizes.activations, False, None
    match declaration:
        case Embed():
            takes, gives = 0, declaration.hidden
            work = Work(kept=weights)
        case Norm():
            takes = gives = declaration.hidden
        case Column():
            takes, gives = declaration.columns, sum(part.rows for part in declaration.parts)
            joined = len(declaration.parts) > 1
        case GatedColumn():
            takes, gives = declaration.columns, declaration.gate.rows
        case Row():
            takes, gives = declaration.columns, declaration.rows
        case Head():
            takes, gives, gives_element = declaration.hidden, declaration.vocab, 4
        case Attend():
            heads, dim = declaration.heads, declaration.head_dim
            takes = (heads * (2 if declaration.gated else 1) + 2 * declaration.kv_heads) * dim
            gives = heads * dim
            work = _attend(declaration, weights, mesh, sizes)
        case Delta():
            takes = declaration.channels + declaration.value_heads * (declaration.value_dim + 2)
            gives = declaration.value_heads * declaration.value_dim
            work = _delta(declaration, weights, mesh)
        case Mix():
            takes = gives = declaration.hidden
            work = Work(weights, operations, _experts(declaration, specs, mesh, sizes))
            travel = _travel(declaration, mesh, sizes)
        case _:
            raise TypeError(f"step '{declaration.name}' is of a kind that the compiler doesn't know")
    like = re.sub(r"\.\d+\.", ".", declaration.name, count=1).removeprefix("model.layers.")
    return Op(declaration.placed, takes, gives, work, sizes.activations, gives_element, like, joined, travel)


def _attend(step: Attend, weights: float, mesh: Mesh, sizes: Bytes) -> Work:
    heads, kv_heads = step.heads // mesh.tp, max(1, step.kv_heads // mesh.tp)
    token_bytes = 2.0 * kv_heads * step.head_dim * sizes.cache
    # Windows and states are whole on each of the ranks that share out longer contexts.
    parts = 1 if step.window else mesh.cp
    cache = CacheWork(token_bytes, step.window, operations=4.0 * heads * step.head_dim, parts=parts)
    # A part's result and the logarithm of its weight, in float32.
    merge = Merge(parts, 4.0 * heads * (step.head_dim + 1), token_bytes) if parts > 1 else None
    return Work(weights, cache=cache, merge=merge)


def _delta(step: Delta, weights: float, mesh: Mesh) -> Work:
    state = step.value_heads * step.key_dim * step.value_dim / mesh.tp
    window = step.channels * (step.width - 1) / mesh.tp
    # The state is float32, read and written; decay, two products and an outer product.
    return Work(weights, 8 * state, cache=CacheWork(request_bytes=2 * (4 * state + 2 * window)))


def _experts(step: Mix, specs: tuple[WeightSpec, ...], mesh: Mesh, sizes: Bytes) -> ExpertWork:
    stacks = sum(_elements(spec) for spec in specs if spec.use == "experts")
    one = stacks / step.count / mesh.moe_tp
    return ExpertWork(step.count // mesh.ep, step.count, step.routing.top_k, one * sizes.matrices, 2 * one)


def _travel(step: Mix, mesh: Mesh, sizes: Bytes) -> Travel:
    specs = [spec for spec in replace(step, dispatched=True).weights() if spec.use != "experts"]
    twice = [spec for spec in specs if WHOLE in spec.name]
    # In place of those that are shared out over more ranks.
    others = {spec.name.replace(WHOLE, "") for spec in twice}
    own = [spec for spec in specs if spec.name not in others]
    operations = sum(2 * _rows(spec, mesh) * _columns(spec, mesh) for spec in own if spec.use == "linear")
    weights, kept = (sum(_share(spec, mesh, sizes) for spec in found) for found in (own, twice))
    return Travel(step.routing.top_k, Work(weights, operations), kept)


def _share(spec: WeightSpec, mesh: Mesh, sizes: Bytes) -> float:
    each = 4.0 if spec.wide else sizes.matrices if spec.use == "linear" else float(sizes.activations)
    return _rows(spec, mesh) * _columns(spec, mesh) * each


def _rows(spec: WeightSpec, mesh: Mesh) -> int:
    ranks = mesh.features(spec.axis).size if spec.placement == Shard(0) else 1

    def share(segment: Segment) -> int:
        return -(-(segment.rows // segment.unit) // ranks) * segment.unit

    return sum(share(segment) for segment in spec.segments)


def _columns(spec: WeightSpec, mesh: Mesh) -> float:
    ranks = mesh.features(spec.axis).size if spec.placement == Shard(1) else 1
    return (spec.columns or 1) / ranks


def _elements(spec: WeightSpec) -> int:
    return spec.rows * (spec.columns or 1)


def _check(declaration: Declaration, mesh: Mesh) -> None:
    match declaration:
        case Attend():
            _shared(declaration, "heads", declaration.heads, "tp", mesh.tp)
            kv_heads = declaration.kv_heads
            if mesh.tp % kv_heads and kv_heads % mesh.tp:
                fitting = [size for size in _divisors(declaration.heads) if _fit(size, kv_heads)]
                raise MeshError(
                    f"step '{declaration.name}' has {kv_heads} heads of keys and values, which --tp {mesh.tp}"
                    f" neither shares out nor repeats; take {_or(fitting)} for --tp"
                )
        case Delta():
            _shared(declaration, "key heads", declaration.key_heads, "tp", mesh.tp)
        case GatedColumn():
            _shared(declaration, "inner features", declaration.gate.rows, "dense-tp", mesh.dense_tp)
        case Mix():
            _shared(declaration, "experts", declaration.count, "ep", mesh.ep)
            _shared(declaration, "inner features", declaration.intermediate, "moe-tp", mesh.moe_tp)
            if declaration.shared is not None:
                size = declaration.shared.intermediate
                if size % mesh.world:
                    raise MeshError(
                        f"step '{declaration.name}' has a shared expert of {size} inner features, which"
                        f" {mesh.world} ranks can't share; take {_or(_divisors(size))} ranks"
                    )
        case _:
            pass


def _shared(declaration: Declaration, what: str, count: int, flag: str, ranks: int) -> None:
    if count % ranks:
        raise MeshError(
            f"step '{declaration.name}' has {count} {what}, which --{flag} {ranks} can't share out; take"
            f" {_or(_divisors(count))} for --{flag}"
        )


def _fit(ranks: int, kv_heads: int) -> bool:
    return ranks % kv_heads == 0 or kv_heads % ranks == 0


def _divisors(count: int, most: int = 64) -> list[int]:
    return [size for size in range(1, most + 1) if count % size == 0]


def _or(sizes: list[int]) -> str:
    found = [str(size) for size in sizes]
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"
