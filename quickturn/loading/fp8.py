"""Checkpoints in 8-bit floating point: matrices in e4m3 beside their scales, as `quantization_config` with
`quant_method` fp8, compressed-tensors or modelopt has them.

A matrix `X` comes with `X_scale_inv` (DeepSeek, Qwen: a scale for each block of 128 x 128) or `X_scale`
(one for the whole, one a row, or blocks); an element is worth `e4m3 * scale`, whatever the name says.
Scales of activations (`input_scale`) are left out: they are taken as they come, or scaled by what they are.
Scales of a cache in e4m3 are `k_scale` and `v_scale` of a decoder layer's attention.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from quickturn_kernels.ops.linear.fp8 import BLOCK, FP8, dequantize

from quickturn.loading.source import TensorSource, box, take
from quickturn.parallel.weights import Cut, Segment, WeightSpec

_CACHE_SCALE = re.compile(r"layers\.(\d+)\.self_attn\.(?:[kv]_proj\.|attn\.)?([kv])_scale")
_ACTIVATION_SCALES = (".input_scale", ".q_scale", ".prob_scale", ".kv_scale")


class Fp8Source:
    """A source in which an e4m3 matrix and its scale are one tensor, of floats or as they are (`kept`)."""

    def __init__(self, source: TensorSource) -> None:
        """Sources without such matrices are left as they are."""
        self._source = source
        shapes = dict(source.shapes())
        self._scales: dict[str, str] = {}
        for name in list(shapes):
            for ending in ("_scale_inv", "_scale"):
                whole = name.removesuffix(ending)
                if whole != name and whole in shapes:
                    self._scales[whole] = name
        cache_scales = {name: match for name in shapes if (match := _CACHE_SCALE.search(name))}
        self._cache_scales = {(int(match[1]), match[2]): name for name, match in cache_scales.items()}
        hidden = {*self._scales.values(), *cache_scales}
        self._shapes = {
            name: shape
            for name, shape in shapes.items()
            if name not in hidden and not (self._scales and name.endswith(_ACTIVATION_SCALES))
        }
        self._scale_shapes = {name: shapes[scale] for name, scale in self._scales.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor but the scales."""
        return self._shapes

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """As the source says; None for e4m3."""
        return None if name in self._scales else self._source.stored_bits(name)

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """As the source does; matrices in e4m3 are dequantised in float32 and rounded once."""
        if name not in self._scales:
            self._source.read_into(name, out, cut)
            return
        shape = self._shapes[name]
        whole = Cut(shape, shape, tuple((0, size, 1) for size in shape))
        sides, rest = box(cut or whole, (*(1 for _ in shape[:-2]), BLOCK, BLOCK))
        stored = self._stored(name, sides, out.device)
        scale = _scale_of(self.scale(name, out.device), sides)
        full = torch.empty(stored.shape, dtype=out.dtype if cut is None else torch.float32, device=out.device)
        if len(shape) == 2:
            dequantize(stored, scale, full)
        else:
            for matrix, by, target in zip(stored, scale, full, strict=True):
                dequantize(matrix, by, target)
        out.copy_(take(full, rest).reshape(out.shape))

    def scale(self, name: str, device: torch.device) -> torch.Tensor:
        """The scale of a matrix in e4m3, in float32: [1], [rows] or [blocks, blocks]."""
        scale = torch.empty(self._scale_shapes[name], dtype=torch.float32, device=device)
        self._source.read_into(self._scales[name], scale)
        if scale.ndim == 2 and self._scales[name].endswith("_inv"):
            return scale
        if scale.numel() == 1:
            return scale.reshape(1)
        return scale[:, 0] if scale.shape == (self._shapes[name][0], 1) else scale

    def kept(self, spec: WeightSpec, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A matrix or a stack of them in e4m3, `spec.shape`, with all the bits that the checkpoint has, and
        its scales: [rows], or of blocks [rows / 128, columns / 128] of each matrix.

        None where a part of it is stored in another way, or where the blocks of its parts don't meet the
        blocks of the whole.
        """
        if any(segment.tensor not in self._scales for segment in spec.segments):
            return None
        if spec.columns is None or spec.wide or spec.offset or spec.zero:
            return None
        if any(segment.rows_read != segment.rows for segment in spec.segments):
            return None
        scales: list[torch.Tensor] = []
        row = 0
        for segment in spec.segments:
            scale = self._segment_scale(segment, row, device)
            if scale is None or (scales and scales[0].ndim != scale.ndim):
                return None
            scales.append(scale)
            row += segment.rows
        scale = torch.cat(scales)
        if spec.stack:
            if scale.ndim == 1 or spec.rows // spec.stack % BLOCK or spec.columns % BLOCK:
                return None
            scale = scale.view(spec.stack, -1, scale.shape[1])
        weight = torch.empty((spec.rows, spec.columns), dtype=torch.uint8, device=device).view(FP8)
        row = 0
        for segment in spec.segments:
            self._source.read_into(segment.tensor, weight[row : row + segment.rows], segment.taken)
            row += segment.rows
        return weight.view(spec.shape), scale

    def cache_scales(self) -> dict[int, tuple[float, float]]:
        """What keys and values of each decoder layer are divided by in a cache in e4m3, where it's stated."""
        found = {}
        for layer in {layer for layer, _ in self._cache_scales}:
            pair = [torch.ones(1), torch.ones(1)]
            for which, scale in zip("kv", pair, strict=True):
                name = self._cache_scales.get((layer, which))
                if name is not None:
                    self._source.read_into(name, scale.view(self._source.shapes()[name]))
            found[layer] = (pair[0].item(), pair[1].item())
        return found

    def _stored(self, name: str, sides: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
        shape = self._shapes[name]
        size = [high - low for low, high in sides]
        stored = torch.empty(size, dtype=torch.uint8, device=device).view(FP8)
        self._source.read_into(name, stored, Cut(shape, shape, tuple((*side, 1) for side in sides)))
        return stored

    def _segment_scale(self, segment: Segment, start: int, device: torch.device) -> torch.Tensor | None:
        """The scales of a segment's rows, [rows] or of blocks; `start`: its first row in the whole."""
        found = _rows_of(segment, self._shapes[segment.tensor])
        if found is None:
            return None
        rows, (first_column, last_column) = found
        scale = self.scale(segment.tensor, device)
        if scale.ndim < 2:
            return scale.expand(segment.rows) if scale.numel() == 1 else scale[rows.to(device)]
        if start % BLOCK or first_column % BLOCK:
            return None
        scale = scale[:, _blocks((first_column, last_column))]
        blocks = []
        for block in torch.split(rows, BLOCK):
            first = int(block[0])
            if first % BLOCK or not torch.equal(block, torch.arange(first, first + len(block))):
                return None
            blocks.append(first // BLOCK)
        return scale[blocks]


def _rows_of(segment: Segment, shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, int]] | None:
    """Which rows of its tensor a segment takes, in order, and which columns (start, stop) of them; None if it
    takes anything else.
    """
    if len(shape) != 2:
        return None
    cut = segment.taken
    if cut is None:
        return torch.arange(shape[0]), (0, shape[1])
    if cut.swapped or cut.view[-1] != shape[1] or cut.at[-1][2] != 1:
        return None
    rows = take(torch.arange(shape[0])[:, None].expand(shape), cut)[..., 0].reshape(-1)
    return rows, cut.at[-1][:2]


def _scale_of(scale: torch.Tensor, sides: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The scales of a box of a matrix, or of a stack of them, whose sides are whole blocks."""
    rows, columns = sides[-2:]
    if len(sides) == 3:
        scale = scale[slice(*sides[0])]
        if scale.ndim < 3:
            return scale[:, slice(*rows)] if scale.ndim == 2 and scale.shape[1] > 1 else scale
    elif scale.ndim == 1:
        return scale if scale.shape[0] == 1 else scale[slice(*rows)]
    return scale if scale.shape[-2:] == (1, 1) else scale[..., _blocks(rows), _blocks(columns)]


def _blocks(side: tuple[int, int]) -> slice:
    """The blocks that cover elements start to stop."""
    return slice(side[0] // BLOCK, -(-side[1] // BLOCK))
