"""Random weights, for measuring speed without a checkpoint."""

import zlib
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from quickturn.parallel.weights import WeightSpec


class DummySource:
    """Every tensor that `specs` ask for, made on the device: the same seed, device and dtype give the same
    values.
    """

    def __init__(self, specs: Iterable[WeightSpec], seed: int = 0) -> None:
        """Nothing is made before it is read."""
        self._seed = seed
        self._shapes = {
            segment.tensor: (segment.rows,) if spec.columns is None else (segment.rows, spec.columns)
            for spec in specs
            for segment in spec.segments
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """None: nothing here is quantised."""
        return None

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Ones for norms, else normal with deviation 0.02, as most models are initialised."""
        if out.ndim == 1 and name.endswith(".weight"):
            out.fill_(1.0)
            return
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode(), self._seed))
        out.normal_(0.0, 0.02, generator=generator)
