"""All-reduce in plain PyTorch: everything is gathered, and added up in order."""

import torch
from torch import Tensor

from quickturn_kernels.ops.all_reduce import Peers
from quickturn_kernels.ops.norm import add_rms_norm
from quickturn_kernels.registry import Priority, register


@register("all_gather", name="reference", priority=Priority.REFERENCE)
def all_gather(x: Tensor, peers: Peers) -> Tensor:
    """See `quickturn_kernels.all_gather`."""
    return peers.gather(x)


@register("all_reduce", name="reference", priority=Priority.REFERENCE)
def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """See `quickturn_kernels.all_reduce`."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for part in peers.gather(x):
        total += part.float()
    return total.to(x.dtype)


@register("all_reduce_add_rms_norm", name="reference", priority=Priority.REFERENCE)
def all_reduce_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers) -> Tensor:
    """See `quickturn_kernels.all_reduce_add_rms_norm`."""
    return add_rms_norm(all_reduce(x, peers), residual, weight, eps)
