"""From host arrays to device tensors without waiting for the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


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
