"""Gated activations in plain PyTorch."""

import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.registry import Priority, register


@register("silu_and_mul", name="reference", priority=Priority.REFERENCE)
def silu_and_mul(x: Tensor) -> Tensor:
    """See `quickturn_kernels.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
