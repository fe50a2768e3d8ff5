"""MXFP4 (Open Compute Project, "Microscaling Formats" 1.0): blocks of 32 four-bit floats, each with
a scale.

A checkpoint keeps a tensor `[..., K]` as `_blocks`, uint8 `[..., K / 32, 16]` with the even element in the
low half of each byte, and `_scales`, uint8 `[..., K / 32]`, exponents of two plus 127.
"""

from collections.abc import Mapping
from typing import Literal

import torch

from quickturn.loading.source import TensorSource, box, take
from quickturn.parallel.weights import MXFP4, Cut

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
BIAS = 127


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., K / 32, 16]` and `[..., K / 32]` to float32 `[..., K]`, exact."""
    values = torch.tensor(_E2M1 + tuple(-value for value in _E2M1))
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1)
    return torch.ldexp(pairs.flatten(-2), scales.to(torch.int32)[..., None] - BIAS).flatten(-2)


class MxfpSource:
    """A source in which each pair of `_blocks` and `_scales` is one tensor, named with `.mxfp4`."""

    def __init__(self, source: TensorSource) -> None:
        """Other tensors are left as they are."""
        self._source = source
        shapes = dict(source.shapes())
        for name in [name for name in shapes if name.endswith("_blocks")]:
            packed = name.removesuffix("_blocks")
            if f"{packed}_scales" in shapes:
                blocks = shapes.pop(name)
                del shapes[f"{packed}_scales"]
                shapes[packed + MXFP4] = (*blocks[:-2], blocks[-2] * BLOCK)
        self._shapes = shapes

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, of packed ones as floats."""
        return self._shapes

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """As the source says; nothing that is packed here."""
        return None if name.endswith(MXFP4) else self._source.stored_bits(name)

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """As the source does; packed tensors are dequantised. Of a part of one
        the blocks are read that hold it."""
        if not name.endswith(MXFP4):
            self._source.read_into(name, out, cut)
            return
        whole = self._shapes[name]
        cut = cut or Cut(whole, whole, tuple((0, size, 1) for size in whole))
        sides, rest = box(cut, (*(1 for _ in whole[:-1]), BLOCK))
        first, last = sides[-1][0] // BLOCK, sides[-1][1] // BLOCK
        blocks, scales = (
            self._bytes(
                f"{name.removesuffix(MXFP4)}_{part}",
                (*whole[:-1], whole[-1] // BLOCK, *width),
                (*sides[:-1], (first, last), *((0, size) for size in width)),
            )
            for part, width in (("blocks", (16,)), ("scales", ()))
        )
        out.copy_(take(dequantize(blocks, scales), rest).reshape(out.shape))

    def _bytes(self, name: str, shape: tuple[int, ...], sides: tuple[tuple[int, int], ...]) -> torch.Tensor:
        part = torch.empty([high - low for low, high in sides], dtype=torch.uint8)
        self._source.read_into(name, part, Cut(shape, shape, tuple((*side, 1) for side in sides)))
        return part
