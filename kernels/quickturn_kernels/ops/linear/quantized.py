"""Weights that stay quantised in memory: where few rows are multiplied, the bytes read are the time."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from quickturn_kernels.ops.linear import LinearWeight
from quickturn_kernels.registry import Op, define

Format = Literal["int8", "int4"]

_QUANTIZE: Op[Callable[[Tensor, Format], LinearWeight]] = define("quantize_linear", "format")


def quantize_linear(weight: Tensor, format: Format) -> LinearWeight:
    """Quantise a weight for `linear` on its device; x stays bfloat16.

    weight: [N, K] float32 or bfloat16. Groups of 32 of a row's K elements share their parameters, in float16:
    int8 is `d q` with -127 <= q <= 127 (GGML's Q8_0), int4 is `d q + m` with 0 <= q <= 15 (Q4_1). A float32
    weight that was dequantised from one of these gets its own numbers back, so that nothing is lost twice.
    Raises LookupError where no implementation can: the caller then keeps `prepare_linear`.
    """
    key = (weight.device, weight.dtype, format)
    function = _QUANTIZE.table.get(key)
    if function is None:
        function = _QUANTIZE.bind(*key)
    return function(weight, format)
