"""Cases of the ops on plain matrices: norms, gated activations, embedding, linear, linear_silu_and_mul."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.activation import gelu_tanh_and_mul, sigmoid_gate, silu_and_mul
from quickturn_kernels.ops.embedding import embedding
from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import PLAIN, linear, prepare_linear, rows_class
from quickturn_kernels.ops.norm import add_rms_norm, rms_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SIZES = ((0, 64, FP32), (1, 576, BF16), (5, 100, FP32), (3, 4096, FP16), (17, 128, BF16))
"""(rows, width, dtype)"""

LINEAR_SIZES = ((0, 64, FP32), (1, 576, BF16), (5, 96, FP32), (33, 256, BF16), (130, 160, FP16))


@dataclass(frozen=True)
class Matrix:
    """What a case is made of; `columns` are what a linear map makes of `width`, or a gated one's gate and up
    together.
    """

    rows: int
    width: int
    dtype: torch.dtype
    columns: int = 128

    def __str__(self) -> str:
        return f"{self.rows} x {self.width} {str(self.dtype).removeprefix('torch.')}"


def dense_cases() -> tuple[Case, ...]:
    """Cases of these ops."""
    found = []
    for size in SIZES:
        shape = Matrix(*size)
        for op, run in (
            ("silu_and_mul", partial(_silu_and_mul, shape)),
            ("gelu_tanh_and_mul", partial(_gelu_tanh_and_mul, shape)),
            ("sigmoid_gate", partial(_sigmoid_gate, shape)),
            ("embedding", partial(_embedding, shape)),
        ):
            found.append(Case(op, str(shape), shape.dtype, {}, run))
        found += norm_cases(shape)
    for size in LINEAR_SIZES:
        for options in ("", "bias", "float32 out"):
            found += linear_cases(Matrix(*size, columns=72), options)
            if options != "float32 out":
                found.append(gated_case(Matrix(*size), options))
    return tuple(found)


def norm_cases(shape: Matrix) -> list[Case]:
    """rms_norm and add_rms_norm, with a weight of the activations' dtype and in float32."""
    return [
        Case(op, f"{shape}{' float32 weight' if wide else ''}", shape.dtype, {}, partial(make, shape, wide))
        for op, make in (("rms_norm", _rms_norm), ("add_rms_norm", _add_rms_norm))
        for wide in (False, True)
    ]


def linear_cases(shape: Matrix, options: str = "") -> list[Case]:
    """linear with a plain weight, and with what prepare_linear makes of it. options: "bias", "float32
    out".
    """
    name = f"{shape} to {shape.columns} {options}".strip()
    run = partial(_linear, shape, options)
    traits = {"layout": PLAIN, "rows": rows_class(shape.rows)}
    return [
        Case("linear", name, shape.dtype, traits, run, {"prepare_linear": "reference"}),
        Case("prepare_linear", name, shape.dtype, {}, run, {"linear": ""}),
    ]


def gated_case(shape: Matrix, options: str = "") -> Case:
    """linear_silu_and_mul with a plain weight. options: "bias"."""
    name = f"{shape} to {shape.columns} {options}".strip()
    traits = {"layout": PLAIN, "rows": rows_class(shape.rows)}
    run = partial(_linear_silu_and_mul, shape, options)
    return Case("linear_silu_and_mul", name, shape.dtype, traits, run, {"prepare_linear": "reference"})


def _random(shape: Matrix, generator: Generator, device: torch.device) -> Tensor:
    """Random rows that lie apart in memory, NaN between them."""
    wide = torch.full((shape.rows, shape.width + 16), float("nan"))
    wide[:, : shape.width] = torch.randn(shape.rows, shape.width, generator=generator)
    return wide.to(shape.dtype).to(device)[:, : shape.width]


def _weight(shape: Matrix, generator: Generator, device: torch.device) -> Tensor:
    return torch.randn(shape.width, generator=generator).to(shape.dtype).to(device)


def _rms_norm(shape: Matrix, wide: bool, generator: Generator, device: torch.device) -> Result:
    x = _random(shape, generator, device)
    weight = _weight(shape, generator, device)
    return Result({"out": rms_norm(x, weight.float() if wide else weight, 1e-5)})


def _add_rms_norm(shape: Matrix, wide: bool, generator: Generator, device: torch.device) -> Result:
    x = _random(shape, generator, device)
    residual = torch.randn(shape.rows, shape.width, generator=generator).to(shape.dtype).to(device)
    weight = _weight(shape, generator, device)
    out = add_rms_norm(x, residual, weight.float() if wide else weight, 1e-5)
    return Result({"out": out, "residual": residual, "x": x})


def _silu_and_mul(shape: Matrix, generator: Generator, device: torch.device) -> Result:
    x = _random(Matrix(shape.rows, 2 * shape.width, shape.dtype), generator, device)
    return Result({"out": silu_and_mul(x)})


def _gelu_tanh_and_mul(shape: Matrix, generator: Generator, device: torch.device) -> Result:
    x = _random(Matrix(shape.rows, 2 * shape.width, shape.dtype), generator, device)
    return Result({"out": gelu_tanh_and_mul(x)})


def _sigmoid_gate(shape: Matrix, generator: Generator, device: torch.device) -> Result:
    x, gate = (_random(shape, generator, device) for _ in range(2))
    return Result({"out": sigmoid_gate(x, gate)})


def _embedding(shape: Matrix, generator: Generator, device: torch.device) -> Result:
    weight = _random(Matrix(11, shape.width, shape.dtype), generator, device)
    ids = torch.randint(-1, 11, (shape.rows,), generator=generator)
    return Result({"out": embedding(ids.to(device), weight)})


def _linear(shape: Matrix, options: str, generator: Generator, device: torch.device) -> Result:
    x = _random(shape, generator, device)
    columns = shape.columns
    weight = torch.randn(columns, shape.width, generator=generator) * shape.width**-0.5
    prepared = prepare_linear(weight.to(shape.dtype).to(device))
    bias = torch.randn(columns, generator=generator).to(shape.dtype).to(device) if options == "bias" else None
    out = linear(x, prepared, bias, FP32 if options == "float32 out" else None)
    # Half-precision operands leave their own rounding in a float32 result.
    return Result({"out": out.to(shape.dtype)})


def _linear_silu_and_mul(shape: Matrix, options: str, generator: Generator, device: torch.device) -> Result:
    x = _random(shape, generator, device)
    columns = shape.columns
    weight = torch.randn(columns, shape.width, generator=generator) * shape.width**-0.5
    prepared = prepare_linear(weight.to(shape.dtype).to(device))
    bias = torch.randn(columns, generator=generator).to(shape.dtype).to(device) if options == "bias" else None
    # Gate, up and silu(gate) are rounded in turn, and any of them may land on the other side.
    return Result({"out": linear_silu_and_mul(x, prepared, bias)}, slack=2.0)
