"""Cases of the products with fp8 weights."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.numerics.dense import Matrix
from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import LinearWeight, linear, prepare_fp8_linear, rows_class
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK, FP8_CHANNEL, quantize_blocks

SIZES = (
    (1, 128, torch.bfloat16),
    (0, 64, torch.float32),
    (5, 300, torch.float32),
    (33, 256, torch.float16),
    (130, 160, torch.float32),
)
"""(rows, width, dtype)"""

Product = Callable[[Tensor, LinearWeight, Tensor | None], Tensor]


def fp8_cases() -> tuple[Case, ...]:
    """Cases of `linear` and `linear_silu_and_mul`; the others take the weight as it was laid out for them."""
    return tuple(
        case
        for size in SIZES
        for layout in (FP8_BLOCK, FP8_CHANNEL)
        for bias in (False, True)
        for case in fp8_pair(Matrix(*size, columns=200), layout, bias)
    )


def fp8_pair(shape: Matrix, layout: str, bias: bool) -> tuple[Case, Case]:
    """`linear` and `linear_silu_and_mul` of one shape and layout."""
    name = f"{shape} to {shape.columns} {layout}{' bias' if bias else ''}"
    traits = {"layout": layout, "rows": rows_class(shape.rows)}
    plain = {"prepare_fp8_linear": "reference"}
    product, gated = partial(_run, linear, shape), partial(_run, linear_silu_and_mul, shape)
    return (
        Case("linear", name, shape.dtype, traits, partial(product, layout, bias), plain),
        Case("linear_silu_and_mul", name, shape.dtype, traits, partial(gated, layout, bias), plain),
    )


def _run(
    product: Product, shape: Matrix, layout: str, biased: bool, generator: Generator, device: torch.device
) -> Result:
    wide = torch.full((shape.rows, shape.width + 16), float("nan"))
    wide[:, : shape.width] = torch.randn(shape.rows, shape.width, generator=generator)
    x = wide.to(shape.dtype).to(device)[:, : shape.width]
    weight, scale = quantize_blocks(torch.randn(shape.columns, shape.width, generator=generator))
    if layout == FP8_CHANNEL:
        scale = torch.rand(shape.columns, generator=generator) * scale.mean()
    scale = scale * shape.width**-0.5
    prepared = prepare_fp8_linear(weight.to(device), scale.to(device))
    bias: Tensor | None = None
    if biased:
        bias = torch.randn(shape.columns, generator=generator).to(shape.dtype).to(device)
    # Sums are taken in another order, on a GPU by tensor cores that keep some 13 bits behind the largest
    # product of each step.
    exact = 500.0 if device.type == "cuda" else 50.0
    return Result({"out": product(x, prepared, bias)}, slack=exact if shape.dtype == torch.float32 else 4.0)
