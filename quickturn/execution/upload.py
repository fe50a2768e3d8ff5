"""From host arrays to device tensors without waiting for the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint8): torch.uint8,
}


def host_tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` as a tensor from which a copy to `device` doesn't wait.

    For a GPU it is pinned: a copy from pageable memory waits for everything that the stream still has to
    do. On a CPU it shares the array's memory, unless that is read-only.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array if array.flags.writeable else array.copy()))
    return tensor if device.type == "cpu" else tensor.pin_memory()


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`array` on `device`, in stream order."""
    tensor = host_tensor(array, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Bundle:
    """Several small arrays that travel as one: their shapes and dtypes, and where each begins in bytes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]
    starts: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> "Bundle":
        """The bundle of arrays like these."""
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        shapes, dtypes = tuple(array.shape for array in arrays), tuple(array.dtype for array in arrays)
        return cls(shapes, dtypes, tuple(starts), end)

    def pack(self, arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8]:
        """The bytes of all arrays, one behind the other."""
        packed = np.empty(self.nbytes, dtype=np.uint8)
        for array, start in zip(arrays, self.starts, strict=True):
            packed[start : start + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
        return packed

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The arrays as views of the packed bytes, wherever they are now."""
        return tuple(
            packed[start : start + math.prod(shape) * dtype.itemsize].view(_TORCH[dtype]).view(shape)
            for shape, dtype, start in zip(self.shapes, self.dtypes, self.starts, strict=True)
        )


def upload_together(arrays: Sequence[NDArray[Any]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """As `upload` for each, with one copy for all."""
    if device.type == "cpu":
        return tuple(host_tensor(array, device) for array in arrays)
    bundle = Bundle.of(arrays)
    return bundle.unpack(upload(bundle.pack(arrays), device))
