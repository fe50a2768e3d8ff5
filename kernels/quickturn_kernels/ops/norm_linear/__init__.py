"""Matrix products of a decode step's few rows together with what lies between them: the norm ahead, the
addition to the residual stream behind. A step of them has no kernels for norms.

The residual stream is changed by `linear_add` alone. A branch that nobody has added yet travels beside it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight, rows_class
from quickturn_kernels.registry import Op, define

_Weight = LinearWeight
_NORM_LINEAR: Op[
    Callable[
        [Tensor, Tensor | None, Tensor, float, _Weight, Tensor | None, torch.dtype | None],
        Tensor,
    ]
] = define("norm_linear", "layout", "rows")
_NORM_GATED: Op[Callable[[Tensor, Tensor | None, Tensor, float, _Weight, Tensor | None], Tensor]] = define(
    "norm_linear_silu_and_mul", "layout", "rows"
)
_LINEAR_ADD: Op[Callable[[Tensor, _Weight, Tensor | None, Tensor, Tensor | None], None]] = define(
    "linear_add", "layout", "rows"
)
_NORM_ROWS: Op[Callable[[LinearWeight], int]] = define("norm_linear_rows", "layout")
_ADD_ROWS: Op[Callable[[LinearWeight], int]] = define("linear_add_rows", "layout")


def norm_linear(
    residual: Tensor,
    branch: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight | Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`linear(rms_norm(residual + branch, norm_weight, eps), weight, bias, out_dtype)`.

    residual, branch: [T, K] of one dtype, rows may be strided; branch None: none is added. The sum is rounded
    to that dtype, as `add_rms_norm` does, but residual is not changed. Returns a new [T, N].
    """
    weight = _laid_out(weight)
    key = (residual.device, residual.dtype, weight.layout, rows_class(residual.shape[0]))
    function = _NORM_LINEAR.table.get(key)
    if function is None:
        function = _NORM_LINEAR.bind(*key)
    return function(residual, branch, norm_weight, eps, weight, bias, out_dtype)


def norm_linear_silu_and_mul(
    residual: Tensor,
    branch: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: LinearWeight | Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`linear_silu_and_mul(rms_norm(residual + branch, norm_weight, eps), weight, bias)`; see `norm_linear`.
    weight: [2I, K]. Returns a new [T, I].
    """
    weight = _laid_out(weight)
    key = (residual.device, residual.dtype, weight.layout, rows_class(residual.shape[0]))
    function = _NORM_GATED.table.get(key)
    if function is None:
        function = _NORM_GATED.bind(*key)
    return function(residual, branch, norm_weight, eps, weight, bias)


def linear_add(
    x: Tensor, weight: LinearWeight | Tensor, bias: Tensor | None, residual: Tensor, branch: Tensor | None
) -> None:
    """`residual += branch`, then `residual += linear(x, weight, bias)`, in place.

    x: [T, K]. residual, branch: [T, N] of x.dtype, rows may be strided; branch None: none is added. Both sums
    and the product are rounded to that dtype.
    """
    weight = _laid_out(weight)
    key = (x.device, x.dtype, weight.layout, rows_class(x.shape[0]))
    function = _LINEAR_ADD.table.get(key)
    if function is None:
        function = _LINEAR_ADD.bind(*key)
    function(x, weight, bias, residual, branch)


def norm_linear_rows(weight: LinearWeight) -> int:
    """Up to how many rows `norm_linear`, or `norm_linear_silu_and_mul`, with this weight is faster than its
    ops in turn; 0 where it never is.
    """
    return _rows(_NORM_ROWS, weight)


def linear_add_rows(weight: LinearWeight) -> int:
    """The same of `linear_add`, beside a norm that adds."""
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
