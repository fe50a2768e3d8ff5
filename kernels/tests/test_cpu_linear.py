"""Linear layers and embeddings of the CPU tier: layouts, shapes, quantised weights."""

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cpu_native
from quickturn_kernels.ops.linear import Quantization

if not cpu_native.AVAILABLE:
    pytest.skip("the CPU extension is not built", allow_module_level=True)

from quickturn_kernels import _cpu

needs_tiles = pytest.mark.skipif(not cpu_native.HAS_TILES, reason="no AMX")
SIZES = ((960, 576), (33, 64), (16, 1536), (7, 40), (5, 33))
FORMATS: tuple[Quantization, ...] = ("int8", "int4")


@pytest.fixture
def generator() -> torch.Generator:
    print("seed 0")
    return torch.Generator().manual_seed(0)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("level", ["base", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_float32(generator: torch.Generator, level: str, size: tuple[int, int], bias: bool) -> None:
    best = _cpu.isa()
    if not _cpu.use_isa(level):
        pytest.skip(f"no {level}")
    weight = random(generator, *size) / size[1] ** 0.5
    vector = random(generator, size[0]) if bias else None
    prepared = kernels.prepare_linear(weight)
    for rows in (0, 1, 2, 3, 4, 5, 40):
        x = random(generator, rows, size[1] + 3)[:, : size[1]]
        exact = exact_linear(x, weight, vector).float()
        torch.testing.assert_close(kernels.linear(x, prepared, vector), exact, atol=3e-6, rtol=1e-5)
    _cpu.use_isa(best)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_bfloat16(
    generator: torch.Generator, size: tuple[int, int], bias: bool, out_dtype: torch.dtype | None
) -> None:
    weight = random(generator, *size, dtype=torch.bfloat16) / size[1] ** 0.5
    vector = random(generator, size[0], dtype=torch.bfloat16) if bias else None
    prepared = kernels.prepare_linear(weight)
    exact_result = out_dtype == torch.float32 and prepared.layout != "plain"
    tolerance = 1e-4 if exact_result else 2e-2
    for rows in (0, 1, 2, 15, 16, 17, 32, 33, 48, 70, 1100):
        x = random(generator, rows, size[1] + 32, dtype=torch.bfloat16)[:, : size[1]]
        result = kernels.linear(x, prepared, vector, out_dtype)
        assert result.dtype == (out_dtype or torch.bfloat16)
        exact = exact_linear(x, weight, vector).to(result.dtype)
        torch.testing.assert_close(result, exact, atol=tolerance, rtol=tolerance)


@needs_tiles
def test_a_tied_table_is_read_where_it_lies(generator: torch.Generator) -> None:
    table = random(generator, 77, 96, dtype=torch.bfloat16)
    ids = torch.randint(-2, 80, (300,), generator=generator)
    expected = kernels.embedding(ids, table)
    assert torch.equal(kernels.embedding(ids, kernels.prepare_linear(table)), expected)
    assert torch.equal(expected[ids < 0], torch.zeros_like(expected[ids < 0]))


def dequantised(weight: kernels.LinearWeight) -> Tensor:
    return kernels.embedding(torch.arange(weight.shape[0]), weight)


@needs_tiles
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [(96, 64), (33, 576), (70, 1536)])
def test_quantised_products(generator: torch.Generator, format: Quantization, size: tuple[int, int]) -> None:
    prepared = kernels.prepare_linear(random(generator, *size), quantize=format)
    weight = dequantised(prepared)
    bias = random(generator, size[0], dtype=torch.bfloat16)
    for rows in (0, 1, 2, 16, 17, 33, 100):
        x = random(generator, rows, size[1], dtype=torch.bfloat16) / size[1] ** 0.5
        result = kernels.linear(x, prepared, bias, torch.float32)
        # One row multiplies the exact weights, more rows those rounded to bfloat16.
        tolerance = 1e-2 if rows == 1 else 1e-5
        exact = exact_linear(x, weight, bias).float()
        torch.testing.assert_close(result, exact, atol=tolerance, rtol=tolerance)


@needs_tiles
def test_int8_follows_q8_0(generator: torch.Generator) -> None:
    weight = random(generator, 40, 64)
    weight[3] = 0
    groups = weight.view(40, 2, 32)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    numbers = (groups / scale.where(scale > 0, 1)).round()
    expected = (numbers * scale).view(40, 64).bfloat16()
    assert torch.equal(dequantised(kernels.prepare_linear(weight, quantize="int8")), expected)


@needs_tiles
def test_int4_returns_the_numbers_of_q4_1(generator: torch.Generator) -> None:
    numbers = torch.randint(0, 16, (40, 2, 32), generator=generator).float()
    numbers[..., 0], numbers[..., 1] = 0, 15  # a quantiser's groups hold both ends
    scale = (torch.rand(40, 2, 1, generator=generator) / 20 + 1e-3).half().float()
    minimum = random(generator, 40, 2, 1).half().float()
    weight = (numbers * scale + minimum).view(40, 64)
    assert torch.equal(dequantised(kernels.prepare_linear(weight, quantize="int4")), weight.bfloat16())


def test_a_format_that_nobody_has_is_refused(generator: torch.Generator) -> None:
    with pytest.raises(LookupError):
        kernels.prepare_linear(random(generator, 4, 40), quantize="int8")
    with pytest.raises(LookupError):
        kernels.prepare_linear(random(generator, 4, 64), quantize="int3")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated(generator: torch.Generator, dtype: torch.dtype) -> None:
    weight = random(generator, 128, 64, dtype=dtype) / 8
    x = random(generator, 5, 64, dtype=dtype)
    expected = kernels.silu_and_mul(kernels.linear(x, weight))
    result = kernels.linear_silu_and_mul(x, kernels.prepare_linear(weight))
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2)
