"""Gated activations."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.registry import Op, define

_SILU_AND_MUL: Op[Callable[[Tensor], Tensor]] = define("silu_and_mul")


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` where x = [gate, up] along the last dim.

    x: [T, 2I], rows may be strided. Computed in float32, silu rounded to x.dtype before the product (as
    PyTorch's `silu(gate) * up` rounds). Returns a new [T, I] of x.dtype.
    """
    function = _SILU_AND_MUL.table.get((x.device, x.dtype))
    if function is None:
        function = _SILU_AND_MUL.bind(x.device, x.dtype)
    return function(x)
