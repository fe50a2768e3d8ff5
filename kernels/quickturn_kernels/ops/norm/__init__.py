"""Root mean square norms."""

from collections.abc import Callable

from torch import Tensor

from quickturn_kernels.registry import Op, define

_RMS_NORM: Op[Callable[[Tensor, Tensor, float], Tensor]] = define("rms_norm")
_ADD_RMS_NORM: Op[Callable[[Tensor, Tensor, Tensor, float], Tensor]] = define("add_rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`(x / sqrt(mean(x^2) + eps)).to(dtype) * weight` over the last dim.

    x: [T, H], rows may be strided. weight: [H]. Statistics in float32; the quotient is rounded to x.dtype
    before the multiplication, as transformers' LlamaRMSNorm does, unless weight is float32: then only the
    product is rounded, as in Gemma's norms. Returns a new [T, H] of x.dtype.
    """
    function = _RMS_NORM.table.get((x.device, x.dtype))
    if function is None:
        function = _RMS_NORM.bind(x.device, x.dtype)
    return function(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place (rounded to its dtype), then `rms_norm(residual, weight, eps)`.

    x, residual: [T, H] of one dtype. weight: [H]. Returns a new [T, H]; x is not changed.
    """
    function = _ADD_RMS_NORM.table.get((x.device, x.dtype))
    if function is None:
        function = _ADD_RMS_NORM.bind(x.device, x.dtype)
    return function(x, residual, weight, eps)
