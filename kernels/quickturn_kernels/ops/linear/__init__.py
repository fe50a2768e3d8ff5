"""Matrix products with a weight that was laid out beforehand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quickturn_kernels.ops.linear.fp8 import FP8, FP8_BLOCK, FP8_CHANNEL, aligned_scales, quantize_blocks
from quickturn_kernels.registry import Op, define

PLAIN = "plain"
"""The layout of a weight kept as it came: `tensors[0]` is [N, K], row-major."""


@dataclass(frozen=True, eq=False)
class LinearWeight:
    """A weight as some implementation wants it.

    `shape` is (N, K) of the matrix as the model knows it, `dtype` its dtype before any packing. `layout`
    names the packing: an implementation of `linear` states the layouts it reads in `traits={"layout":
    {...}}`; `tensors` belong to it.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    layout: str
    tensors: tuple[Tensor, ...]


Quantization = Literal["int8", "int4", "fp8"]

_PREPARE: Op[Callable[[Tensor, int | None], LinearWeight]] = define("prepare_linear")
_QUANTIZE: Op[Callable[[Tensor, Quantization], LinearWeight]] = define("quantize_linear", "format")
_PREPARE_FP8: Op[Callable[[LinearWeight], LinearWeight]] = define("prepare_fp8_linear", "layout")
_LINEAR: Op[Callable[[Tensor, LinearWeight, Tensor | None, torch.dtype | None], Tensor]] = define(
    "linear", "layout", "rows"
)

FEW_ROWS = 64
"""Up to so many rows x is small beside any weight, and the product as fast as the weight can be read."""


def rows_class(rows: int) -> str:
    """The trait "rows" of a call: "few" or "many"."""
    return "few" if rows <= FEW_ROWS else "many"


def prepare_linear(
    weight: Tensor, *, max_rows_hint: int | None = None, quantize: Quantization | None = None
) -> LinearWeight:
    """Lay a weight out for `linear` on its device; done once at load.

    weight: [N, K] row-major; it may be kept or copied, so the caller drops its own reference.
    max_rows_hint: the most rows that x will usually have (None: anything from one row to a long prompt).
    quantize: keep fewer bits of a float32 or bfloat16 weight; x is then bfloat16. Groups of 32 of a row's K
    elements share their parameters, in float16: int8 is `d q` with -127 <= q <= 127 (GGML's Q8_0), int4 is
    `d q + m` with 0 <= q <= 15 (Q4_1). A float32 weight that was dequantised from one of these gets its own
    numbers back, so that nothing is lost twice. fp8 is e4m3 with a scale for each block of 128 x 128
    (`ops/linear/fp8.py`), anywhere. Raises LookupError where no implementation can.
    """
    if quantize == "fp8":
        return prepare_fp8_linear(*quantize_blocks(weight))
    if quantize is not None:
        key = (weight.device, weight.dtype, quantize)
        quantizer = _QUANTIZE.table.get(key)
        if quantizer is None:
            quantizer = _QUANTIZE.bind(*key)
        return quantizer(weight, quantize)
    function = _PREPARE.table.get((weight.device, weight.dtype))
    if function is None:
        function = _PREPARE.bind(weight.device, weight.dtype)
    return function(weight, max_rows_hint)


def prepare_fp8_linear(weight: Tensor, scale: Tensor) -> LinearWeight:
    """Lay a weight out that is e4m3 already; see `ops/linear/fp8.py` for the scales.

    weight: [N, K] float8_e4m3fn; it may be kept or changed in place. scale: block scales
    [ceil(N / 128), ceil(K / 128)], or [N] for rows. x may be of any float dtype later. Raises ValueError for
    scales of another shape.
    """
    rows, columns = weight.shape
    if scale.shape == (rows,):
        given = LinearWeight((rows, columns), FP8, FP8_CHANNEL, (weight, scale.float().contiguous()))
    else:
        aligned = aligned_scales(rows, columns, weight.device)
        if weight.dtype != FP8 or scale.shape != aligned.shape:
            raise ValueError(
                f"{weight.dtype} [{rows}, {columns}] with scales {list(scale.shape)} is no fp8 layout"
            )
        aligned.copy_(scale)
        given = LinearWeight((rows, columns), FP8, FP8_BLOCK, (weight, aligned))
    key = (weight.device, FP8, given.layout)
    function = _PREPARE_FP8.table.get(key)
    if function is None:
        function = _PREPARE_FP8.bind(*key)
    return function(given)


def linear(
    x: Tensor, weight: LinearWeight | Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`x @ weight.T + bias`, accumulated in float32.

    x: [T, K]. weight: from `prepare_linear`, or a plain [N, K] tensor. bias: [N] or None. out_dtype: dtype
    of the result, by default x.dtype. Returns a new [T, N].
    """
    if isinstance(weight, Tensor):
        weight = LinearWeight((weight.shape[0], weight.shape[1]), weight.dtype, PLAIN, (weight,))
    rows = rows_class(x.shape[0])
    function = _LINEAR.table.get((x.device, x.dtype, weight.layout, rows))
    if function is None:
        function = _LINEAR.bind(x.device, x.dtype, weight.layout, rows)
    return function(x, weight, bias, out_dtype)
