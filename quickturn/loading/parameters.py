"""From declared weights to parameters in memory.

One parameter at a time is read, cast and laid out for the kernels, so that the peak is the weights and the
parameters in work.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import quickturn_kernels
import torch
from quickturn_kernels import LinearWeight, prepare_linear
from quickturn_kernels.ops.linear import prepare_fp8_linear
from quickturn_kernels.ops.linear.fp8 import BLOCK, quantize_blocks

from quickturn.config import Quantization
from quickturn.files.errors import LoadError
from quickturn.loading.fp8 import Fp8Source
from quickturn.loading.source import TensorSource
from quickturn.parallel.placement import Replicate
from quickturn.parallel.shards import Place, local_weights
from quickturn.parallel.weights import Segment, Share, WeightSpec, stored_shape

Progress = Callable[[int, int], None]
"""Called with (elements loaded, elements in all) as loading goes on, from any thread, one call at a time."""

Loaded = tuple[torch.Tensor | LinearWeight, torch.Tensor | None]
"""A parameter, and the scales of a stack in e4m3."""

WORKERS = min(4, os.cpu_count() or 1)
"""Parameters in work at a time: reading, dequantising and laying out overlap."""

GROUP = 32
"""Columns that share a scale in the int8 and int4 of `quickturn_kernels`."""

_NAMED = 5
_BUFFERS = (".rotary_emb.inv_freq",)
"""Endings of tensors in old checkpoints that aren't weights."""


def load_parameters(
    specs: Sequence[WeightSpec],
    source: TensorSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    quantization: Quantization = "none",
    place: Place | None = None,
) -> dict[str, torch.Tensor | LinearWeight]:
    """Every parameter of `specs` on `device`, by name; of each the part that the rank at `place` holds, and
    nothing else is read. Raises LoadError if `source` and `specs` don't match, PlacementError for weights
    that can't be shared out so.

    Stacks of matrices in e4m3 have their scales under `.scale` behind their name.

    A checkpoint tensor that two specs name (a tied head) is read once, and laid out for the head: the
    embedding takes its rows from there.
    """
    specs = choose(specs, source.shapes())
    check_names(specs, source.shapes())
    if place is not None:
        specs = local_weights(specs, place)
    first_use: dict[tuple[str, Share | None], WeightSpec] = {}
    for spec in specs:
        for segment in spec.segments:
            first_use.setdefault((segment.tensor, segment.share), spec)
    users = {
        spec.name: {first_use[segment.tensor, segment.share].name for segment in spec.segments}
        for spec in specs
    }
    own = [spec for spec in specs if users[spec.name] == {spec.name}]
    tied = [spec for spec in specs if users[spec.name] != {spec.name}]
    heads = {user for spec in tied if spec.use == "linear" for user in users[spec.name]}
    total = sum(_elements(spec) for spec in specs)

    def load(spec: WeightSpec) -> Loaded:
        matrix = spec.use == "linear" or spec.name in heads
        if isinstance(source, Fp8Source) and quantization in ("stored", "fp8"):
            kept = source.kept(spec, device)
            if kept is not None:
                return (prepare_fp8_linear(*kept), None) if matrix else kept
        quantize = _format(spec, source, quantization) if matrix or spec.use == "experts" else None
        # From float32, so that the numbers of a file that is quantised alike come back exactly.
        exact = quantize is not None and matrix
        tensor = read(spec, source, torch.float32 if exact else dtype, device)
        if matrix:
            laid_out = (
                prepare_linear(tensor) if quantize is None else prepare_linear(tensor, quantize=quantize)
            )
            return laid_out, None
        return _quantized_stack(spec, tensor) if quantize == "fp8" else (tensor, None)

    quickturn_kernels.load()  # here, so that no two threads import the same tier
    parameters: dict[str, torch.Tensor | LinearWeight] = {}
    done = 0
    with ThreadPoolExecutor(WORKERS, "load") as pool:
        for spec, (parameter, scale) in zip(own, pool.map(load, own), strict=True):
            parameters[spec.name] = parameter
            if scale is not None:
                parameters[f"{spec.name}.scale"] = scale
            done += _elements(spec)
            if progress is not None:
                progress(done, total)
    for spec in tied:
        if len(spec.segments) > 1:
            raise LoadError(f"{spec.name} is tied to a weight that can't be shared")
        parameters[spec.name] = parameters[users[spec.name].pop()]
    if progress is not None:
        progress(total, total)
    return parameters


def _quantized_stack(spec: WeightSpec, stack: torch.Tensor) -> Loaded:
    """[E, N, K] in e4m3 and scales [E, N / 128, K / 128]; as it is where blocks would cross experts, or gate
    and up.
    """
    count, rows, columns = stack.shape
    if rows % (2 * BLOCK if spec.name.endswith("gate_up") else BLOCK) or columns % BLOCK:
        return stack, None
    weight, scale = quantize_blocks(stack.view(-1, columns))
    return weight.view(stack.shape), scale.reshape(count, rows // BLOCK, -1)


def choose(specs: Sequence[WeightSpec], shapes: Mapping[str, tuple[int, ...]]) -> list[WeightSpec]:
    """`specs` with the segments that the checkpoint has, where there are alternatives."""

    def chosen(spec: WeightSpec) -> WeightSpec:
        for segments in spec.alternatives:
            if segments[0].tensor in shapes:
                return replace(spec, segments=segments, alternatives=())
        return spec

    return [
        spec if not spec.alternatives or spec.segments[0].tensor in shapes else chosen(spec) for spec in specs
    ]


def read(spec: WeightSpec, source: TensorSource, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The parameter as it was declared, not laid out for anything: `spec.shape` on `device`, of `dtype`
    unless the declaration wants float32.
    """
    columns = () if spec.columns is None else (spec.columns,)
    tensor = torch.empty((spec.rows, *columns), dtype=torch.float32 if spec.wide else dtype, device=device)
    if spec.zero:
        return tensor.zero_().view(spec.shape)
    row = 0
    for segment in spec.segments:
        part, row = tensor[row : row + segment.rows], row + segment.rows
        if segment.rows_read:
            source.read_into(segment.tensor, part[: segment.rows_read], segment.taken)
        part[segment.rows_read :].zero_()
    if spec.offset:
        tensor += spec.offset
    return tensor.view(spec.shape)


def check_names(specs: Sequence[WeightSpec], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises LoadError naming tensors that are missing, misshapen, or have no place in the model."""
    wanted = {segment.tensor: stored_shape(spec, segment) for spec in specs for segment in spec.segments}
    missing = [name for name in wanted if name not in shapes]
    if missing:
        raise LoadError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors: {_some(missing)}")
    unlike = [
        f"{name} is {list(shapes[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if shapes[name] != shape
    ]
    if unlike:
        raise LoadError(
            f"{len(unlike)} tensors don't have the shape that the config implies: {_some(unlike)}"
        )
    extra = [
        name
        for name in shapes
        if name not in wanted and not name.endswith(_BUFFERS) and name != "lm_head.weight"
    ]
    if extra:
        raise LoadError(
            f"the checkpoint has {len(extra)} tensors that this architecture has no place for: {_some(extra)}"
        )


def _format(
    spec: WeightSpec, source: TensorSource, quantization: Quantization
) -> Literal["int8", "int4", "fp8"] | None:
    """How the kernels keep a matrix; fused tensors that are stored unlike each other are dequantised."""
    if spec.columns is None:
        return None
    if quantization != "fp8" and any(_splits_groups(segment) for segment in spec.segments):
        return None
    if quantization == "stored":
        kept = {source.stored_bits(segment.tensor) for segment in spec.segments}
        return kept.pop() if len(kept) == 1 else None
    if quantization == "fp8":
        # As published checkpoints do: neither the head nor routers, which are small and decide much.
        return None if spec.axis == "vocab" or spec.placement == Replicate() else "fp8"
    return quantization if quantization in ("int8", "int4") else None


def _splits_groups(segment: Segment) -> bool:
    """Whether a rank's columns begin or end within a group that shares its scale."""
    columns = None if segment.share is None else segment.share.columns
    return columns is not None and any(column % GROUP for column in columns)


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:_NAMED]) + (f" and {len(items) - _NAMED} more" if len(items) > _NAMED else "")


def _elements(spec: WeightSpec) -> int:
    return torch.Size(spec.shape).numel()
