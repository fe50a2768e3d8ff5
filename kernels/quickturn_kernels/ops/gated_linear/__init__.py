"""The first half of a gated feed-forward layer as one op."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight, rows_class
from quickturn_kernels.registry import Op, define

_LINEAR_SILU_AND_MUL: Op[Callable[[Tensor, LinearWeight, Tensor | None], Tensor]] = define(
    "linear_silu_and_mul", "layout", "rows"
)


def linear_silu_and_mul(x: Tensor, weight: LinearWeight | Tensor, bias: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` with `gate|up = x @ weight.T + bias`: SwiGLU (Shazeer 2020) up to the second product.

    x: [T, K]. weight: [2I, K], the gate's rows first, from `prepare_linear` or plain. bias: [2I] or None.
    gate, up and silu(gate) are rounded to x.dtype, as the two ops in turn would. Returns a new [T, I] of
    x.dtype.
    """
    if isinstance(weight, Tensor):
        weight = LinearWeight((weight.shape[0], weight.shape[1]), weight.dtype, PLAIN, (weight,))
    rows = rows_class(x.shape[0])
    function = _LINEAR_SILU_AND_MUL.table.get((x.device, x.dtype, weight.layout, rows))
    if function is None:
        function = _LINEAR_SILU_AND_MUL.bind(x.device, x.dtype, weight.layout, rows)
    return function(x, weight, bias)
