"""The plain layout and PyTorch's own matrix product."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.registry import Priority, register


@register("prepare_linear", name="reference", priority=Priority.REFERENCE)
def prepare_linear(weight: Tensor, max_rows_hint: int | None) -> LinearWeight:
    """Keep the weight as it is. See `quickturn_kernels.prepare_linear`."""
    return LinearWeight((weight.shape[0], weight.shape[1]), weight.dtype, PLAIN, (weight,))


@register("linear", name="reference", traits={"layout": {PLAIN}}, priority=Priority.REFERENCE)
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`."""
    result = functional.linear(x, weight.tensors[0], bias)
    return result if out_dtype is None else result.to(out_dtype)
