"""What a loader must be able to do, whatever the file format."""

from collections.abc import Mapping
from typing import Literal, Protocol

import torch


class TensorSource(Protocol):
    """Named tensors, under the names that Hugging Face checkpoints use."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def stored_bits(self, name: str) -> Literal["int8", "int4"] | None:
        """The quantised format of `quickturn_kernels` that holds exactly the numbers of tensor `name`; None
        if there is none."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Write tensor `name` to `out`, of its shape, casting to the dtype and moving to the device of `out`.

        May be called by several threads at once.
        """
