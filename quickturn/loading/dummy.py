"""Random weights, for measuring speed without a checkpoint."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from quickturn.parallel.shards import Place, local_weights
from quickturn.parallel.weights import Cut, WeightSpec, stored_shape


class DummySource:
    """Every tensor that `specs` ask for, made on the device: the same seed, device and dtype give the same
    values, whatever part of them a rank takes.
    """

    def __init__(self, specs: Sequence[WeightSpec], seed: int = 0, place: Place | None = None) -> None:
        """Nothing is made before it is read. `place`: the rank that reads."""
        self._seed = seed
        self._shares = {
            (segment.tensor, segment.taken): (segment.cut, segment.share)
            for spec in (local_weights(specs, place) if place is not None else ())
            for segment in spec.segments
        }
        self._shapes = {
            segment.tensor: stored_shape(spec, segment) for spec in specs for segment in spec.segments
        }
        self._near_one = {
            segment.tensor: 1.0 - spec.offset
            for spec in specs
            for segment in spec.segments
            if spec.columns is None and segment.tensor.endswith(".weight")
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._shapes

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """None: nothing here is quantised."""
        return None

    def read_into(self, name: str, out: torch.Tensor, cut: Cut | None = None) -> None:
        """Norms scale by one; all else is normal with deviation 0.02, as most models are initialised."""
        if name in self._near_one:
            out.fill_(self._near_one[name])
            return
        declared, share = self._shares.get((name, cut), (cut, None))
        if share is not None:
            whole = torch.empty(share.whole, dtype=out.dtype, device=out.device)
            self.read_into(name, whole, declared)
            rows, columns = slice(*share.rows), slice(*(share.columns or (0, None)))
            out.copy_(whole[rows] if share.columns is None else whole[rows, columns])
            return
        key = name if cut is None else f"{name}{cut.at}"
        generator = torch.Generator(out.device).manual_seed(zlib.crc32(key.encode(), self._seed))
        out.normal_(0.0, 0.02, generator=generator)
