"""Embedding in plain PyTorch."""

from torch import Tensor

from quickturn_kernels.registry import Priority, register


@register("embedding", name="reference", priority=Priority.REFERENCE)
def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `quickturn_kernels.embedding`."""
    inside = (ids >= 0) & (ids < weight.shape[0])
    return weight[ids.where(inside, 0)].masked_fill(~inside[:, None], 0)
