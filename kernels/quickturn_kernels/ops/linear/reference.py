"""The plain layout and PyTorch's own matrix product; fp8 weights by their definition."""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.linear.fp8 import BLOCK, FP8_BLOCK, FP8_CHANNEL, dequantize, quantize_rows
from quickturn_kernels.registry import Priority, register


@register("prepare_linear", name="reference", priority=Priority.REFERENCE)
def prepare_linear(weight: Tensor, max_rows_hint: int | None) -> LinearWeight:
    """Keep the weight as it is. See `quickturn_kernels.prepare_linear`."""
    return LinearWeight((weight.shape[0], weight.shape[1]), weight.dtype, PLAIN, (weight,))


@register(
    "prepare_fp8_linear",
    name="reference",
    traits={"layout": {FP8_BLOCK, FP8_CHANNEL}},
    priority=Priority.REFERENCE,
)
def prepare_fp8_linear(weight: LinearWeight) -> LinearWeight:
    """Keep the weight as it is. See `quickturn_kernels.prepare_fp8_linear`."""
    return weight


@register(
    "linear",
    name="reference",
    traits={"layout": {PLAIN, FP8_BLOCK, FP8_CHANNEL}},
    priority=Priority.REFERENCE,
)
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`. Beside fp8 weights x is quantised, too."""
    if weight.layout == PLAIN:
        result = functional.linear(x, weight.tensors[0], bias)
        return result if out_dtype is None else result.to(out_dtype)
    result = _linear_fp8(x, weight)
    if bias is not None:
        result += bias.float()
    return result.to(x.dtype if out_dtype is None else out_dtype)


def _linear_fp8(x: Tensor, weight: LinearWeight) -> Tensor:
    matrix, scale = weight.tensors
    quantized, x_scale = quantize_rows(x, BLOCK if weight.layout == FP8_BLOCK else None)
    if weight.layout == FP8_BLOCK:
        x_scale = x_scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    full = torch.empty(weight.shape, device=x.device)
    dequantize(matrix, scale, full)
    return (quantized.float() * x_scale) @ full.t()
