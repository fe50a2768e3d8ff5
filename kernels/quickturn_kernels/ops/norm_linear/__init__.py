"""Matrix products of a decode step's few rows together with what lies between them: the norm ahead, the
addition to the residual stream behind.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight, rows_class
from quickturn_kernels.registry import Op, define

_NORM_LINEAR: Op[
    Callable[[Tensor, Tensor, float, LinearWeight, Tensor | None, torch.dtype | None], Tensor]
] = define("norm_linear", "layout", "rows")
_NORM_GATED: Op[Callable[[Tensor, Tensor, float, LinearWeight, Tensor | None], Tensor]] = define(
    "norm_linear_silu_and_mul", "layout", "rows"
)
_LINEAR_ADD: Op[Callable[[Tensor, LinearWeight, Tensor | None, Tensor], None]] = define(
    "linear_add", "layout", "rows"
)
_NORM_ROWS: Op[Callable[[LinearWeight], int]] = define("norm_linear_rows", "layout")
_ADD_ROWS: Op[Callable[[LinearWeight], int]] = define("linear_add_rows", "layout")


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear(rms_norm(x, norm_weight, eps), weight, bias, out_dtype)`. x: [T, K], rows may be strided.
    Returns a new [T, N].
    """
    weight = _laid_out(weight)
    key = (x.device, x.dtype, weight.layout, rows_class(x.shape[0]))
    function = _NORM_LINEAR.table.get(key)
    if function is None:
        function = _NORM_LINEAR.bind(*key)
    return function(x, norm_weight, eps, weight, bias, out_dtype)


def norm_linear_silu_and_mul(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight | Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear_silu_and_mul(rms_norm(x, norm_weight, eps), weight, bias)`. x: [T, K], rows may be strided.
    weight: [2I, K]. Returns a new [T, I].
    """
    weight = _laid_out(weight)
    key = (x.device, x.dtype, weight.layout, rows_class(x.shape[0]))
    function = _NORM_GATED.table.get(key)
    if function is None:
        function = _NORM_GATED.bind(*key)
    return function(x, norm_weight, eps, weight, bias)


def linear_add(x: Tensor, weight: LinearWeight | Tensor, bias: Tensor | None, residual: Tensor) -> None:
    """`residual += linear(x, weight, bias)` in place, the product and the sum rounded to their dtype.

    x: [T, K]. residual: [T, N] of x.dtype, rows may be strided.
    """
    weight = _laid_out(weight)
    key = (x.device, x.dtype, weight.layout, rows_class(x.shape[0]))
    function = _LINEAR_ADD.table.get(key)
    if function is None:
        function = _LINEAR_ADD.bind(*key)
    function(x, weight, bias, residual)


def norm_linear_rows(weight: LinearWeight) -> int:
    """Up to how many rows `norm_linear`, or `norm_linear_silu_and_mul`, with this weight is faster than its
    ops in turn; 0 where it never is.
    """
    return _rows(_NORM_ROWS, weight)


def linear_add_rows(weight: LinearWeight) -> int:
    """Up to how many rows `linear_add` with this weight costs no more than a product and an addition in the
    norm behind; 0 where it always does.
    """
    return _rows(_ADD_ROWS, weight)


def _rows(op: Op[Callable[[LinearWeight], int]], weight: LinearWeight) -> int:
    key = (weight.tensors[0].device, weight.dtype, weight.layout)
    function = op.table.get(key)
    if function is None:
        function = op.bind(*key)
    return function(weight)


def _laid_out(weight: LinearWeight | Tensor) -> LinearWeight:
    if isinstance(weight, LinearWeight):
        return weight
    return LinearWeight((weight.shape[0], weight.shape[1]), weight.dtype, PLAIN, (weight,))
