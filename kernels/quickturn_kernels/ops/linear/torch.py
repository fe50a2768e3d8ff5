"""Linear on CUDA through torch, that is cuBLAS: close to both roofs for dense weights."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.platform import CUDA
from quickturn_kernels.registry import Priority, register


@register("linear", name="cublas", platform=CUDA, traits={"layout": {PLAIN}}, priority=Priority.PERFORMANCE)
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`. A float32 result of half-precision operands comes straight from the
    accumulator.
    """
    plain = weight.tensors[0]
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, plain, bias)
    if out_dtype == torch.float32:
        result = torch.mm(x, plain.t(), out_dtype=out_dtype)
        return result if bias is None else result.add_(bias)
    return functional.linear(x, plain, bias).to(out_dtype)
