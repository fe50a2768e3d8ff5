"""Cases of products with a norm ahead or an addition behind: norm_linear, norm_linear_silu_and_mul,
linear_add.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.linear import PLAIN, rows_class
from quickturn_kernels.ops.norm_linear import linear_add, norm_linear, norm_linear_silu_and_mul

EPS = 1e-5
PARTS = dict.fromkeys(("linear", "linear_silu_and_mul", "silu_and_mul", "rms_norm"), "")
"""What the reference is made of: references too beside it, whatever is best beside another."""


@dataclass(frozen=True)
class FoldShape:
    """Rows, columns of the rows that are read, and how many a product makes of them (gated: gate and up
    together). wide: the norm's weight is float32.
    """

    rows: int
    width: int
    features: int
    wide: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        options = " ".join(name for name in ("wide", "bias") if getattr(self, name))
        return f"{self.rows} x {self.width} to {self.features} {dtype} {options}".strip()


SHAPES = (
    FoldShape(0, 64, 64),
    FoldShape(1, 64, 64),
    FoldShape(1, 4096, 256, bias=True),
    FoldShape(1, 1000, 152, wide=True),
    FoldShape(2, 2048, 6144, wide=True),
    FoldShape(3, 1000, 1000, bias=True),
    FoldShape(4, 4096, 512, wide=True),
    FoldShape(4, 200, 8, bias=True),
    FoldShape(3, 2560, 4104),
    FoldShape(5, 256, 128),
    FoldShape(8, 1024, 2048),
    FoldShape(9, 256, 128),
    FoldShape(2, 12288, 64),
    FoldShape(3, 90, 40, dtype=torch.float32, bias=True),
)


def norm_linear_cases() -> tuple[Case, ...]:
    """Every shape of every op."""
    found = [case for shape in SHAPES for case in (*normed_cases(shape), added_case(shape))]
    return (*found, *normed_cases(FoldShape(4, 1024, 5000), "float32 out"))


def normed_cases(shape: FoldShape, options: str = "") -> list[Case]:
    """norm_linear and, unless options are "float32 out", norm_linear_silu_and_mul."""
    if options == "float32 out":
        return [_case("norm_linear", shape, partial(_norm_linear, shape, torch.float32), f" {options}")]
    return [
        _case("norm_linear", shape, partial(_norm_linear, shape, None)),
        _case("norm_linear_silu_and_mul", shape, partial(_norm_gated, shape)),
    ]


def added_case(shape: FoldShape) -> Case:
    """linear_add."""
    return _case("linear_add", shape, partial(_linear_add, shape))


def _case(
    op: str, shape: FoldShape, run: Callable[[Generator, torch.device], Result], options: str = ""
) -> Case:
    traits = {"layout": PLAIN, "rows": rows_class(shape.rows)}
    return Case(op, f"{shape}{options}", shape.dtype, traits, run, PARTS)


def apart(rows: int, width: int, dtype: torch.dtype, generator: Generator, device: torch.device) -> Tensor:
    """Random rows that lie apart in memory, NaN between them."""
    wide = torch.full((rows, width + 24), float("nan"), device=generator.device)
    wide[:, :width] = torch.randn(rows, width, generator=generator, device=generator.device)
    return wide.to(dtype).to(device)[:, :width]


@dataclass(frozen=True)
class FoldInputs:
    """The operands of one call."""

    x: Tensor
    norm_weight: Tensor
    weight: Tensor
    bias: Tensor | None


def fold_inputs(shape: FoldShape, generator: Generator, device: torch.device) -> FoldInputs:
    """Random operands."""

    def vector(size: int, around: float, dtype: torch.dtype) -> Tensor:
        values = torch.randn(size, generator=generator, device=generator.device)
        return (around + 0.3 * values).to(dtype).to(device)

    scale = shape.width**-0.5
    weight = torch.randn(shape.features, shape.width, generator=generator, device=generator.device) * scale
    return FoldInputs(
        x=apart(shape.rows, shape.width, shape.dtype, generator, device),
        norm_weight=vector(shape.width, 1.0, torch.float32 if shape.wide else shape.dtype),
        weight=weight.to(shape.dtype).to(device),
        bias=vector(shape.features, 0.0, shape.dtype) if shape.bias else None,
    )


def _norm_linear(
    shape: FoldShape, out_dtype: torch.dtype | None, generator: Generator, device: torch.device
) -> Result:
    given = fold_inputs(shape, generator, device)
    out = norm_linear(given.x, given.norm_weight, EPS, given.weight, given.bias, out_dtype)
    # Half-precision operands leave their own rounding in a float32 result.
    return Result({"out": out.to(shape.dtype), "x": given.x})


def _norm_gated(shape: FoldShape, generator: Generator, device: torch.device) -> Result:
    given = fold_inputs(shape, generator, device)
    out = norm_linear_silu_and_mul(given.x, given.norm_weight, EPS, given.weight, given.bias)
    return Result({"out": out, "x": given.x}, slack=2.0)


def _linear_add(shape: FoldShape, generator: Generator, device: torch.device) -> Result:
    given = fold_inputs(shape, generator, device)
    residual = apart(shape.rows, shape.features, shape.dtype, generator, device)
    linear_add(given.x, given.weight, given.bias, residual)
    # Where the summands cancel each other, what is left of a larger one's rounding is large.
    return Result({"residual": residual, "x": given.x}, slack=4.0)
