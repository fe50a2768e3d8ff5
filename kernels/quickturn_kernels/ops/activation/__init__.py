"""Gated activations."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.registry import Op, define

_SILU_AND_MUL: Op[Callable[[Tensor], Tensor]] = define("silu_and_mul")
_GELU_TANH_AND_MUL: Op[Callable[[Tensor], Tensor]] = define("gelu_tanh_and_mul")
_SIGMOID_GATE: Op[Callable[[Tensor, Tensor], Tensor]] = define("sigmoid_gate")


def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` where x = [gate, up] along the last dim.

    x: [T, 2I], rows may be strided. Computed in float32, silu rounded to x.dtype before the product (as
    PyTorch's `silu(gate) * up` rounds). Returns a new [T, I] of x.dtype.
    """
    function = _SILU_AND_MUL.table.get((x.device, x.dtype))
    if function is None:
        function = _SILU_AND_MUL.bind(x.device, x.dtype)
    return function(x)


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """`gelu(gate) * up` where x = [gate, up] along the last dim, with gelu's tanh form, `gelu(g) = g / 2 (1 +
    tanh(sqrt(2 / pi) (g + 0.044715 g^3)))`.

    x: [T, 2I], rows may be strided. Computed in float32, gelu rounded to x.dtype before the product. Returns
    a new [T, I] of x.dtype.
    """
    function = _GELU_TANH_AND_MUL.table.get((x.device, x.dtype))
    if function is None:
        function = _GELU_TANH_AND_MUL.bind(x.device, x.dtype)
    return function(x)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`.

    x, gate: [T, N] of one dtype, rows may be strided. Computed in float32, the sigmoid rounded to x.dtype
    before the product. Returns a new [T, N].
    """
    function = _SIGMOID_GATE.table.get((x.device, x.dtype))
    if function is None:
        function = _SIGMOID_GATE.bind(x.device, x.dtype)
    return function(x, gate)
