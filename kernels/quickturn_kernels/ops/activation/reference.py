"""Gated activations in plain PyTorch."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.registry import Priority, register


@register("silu_and_mul", name="reference", priority=Priority.REFERENCE)
def silu_and_mul(x: Tensor) -> Tensor:
    """See `quickturn_kernels.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


@register("gelu_tanh_and_mul", name="reference", priority=Priority.REFERENCE)
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """See `quickturn_kernels.gelu_tanh_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


@register("sigmoid_gate", name="reference", priority=Priority.REFERENCE)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """See `quickturn_kernels.sigmoid_gate`."""
    return x * torch.sigmoid(gate)
