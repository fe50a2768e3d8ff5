"""The Hopper kernels for few rows: that they compile here, and what they compute where there is such a
GPU.
"""

import itertools

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear.hopper_launch import (
    FEW_ROWS,
    RING_LIMIT,
    UNITS,
    choose,
    geometry,
    launch,
    shared_memory,
)

SHAPES = [(6144, 4096), (1024, 2048), (1000, 1024), (152, 200), (64, 64), (4100, 328), (151936, 1024)]
ROWS = (1, 3, 8, 9, 16, 17, 33, 64)

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
needs_compiler = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")


@pytest.mark.parametrize(
    ("weight_rows", "columns"), [*SHAPES, (24576, 4096), (4096, 12288), (8, 64), (128256, 8192)]
)
def test_plans_cover_the_machine_and_fit_it(weight_rows: int, columns: int) -> None:
    tile_rows, split, blocks = geometry(weight_rows, columns)
    tiles = -(-weight_rows // tile_rows)
    assert (tiles * split if split > 1 else min(blocks, tiles)) <= UNITS
    for rows, gated in itertools.product((1, 8, 64), (False, True)):
        plan = choose(rows, weight_rows, columns, gated)
        assert plan.stages >= 2
        assert shared_memory(rows, weight_rows // 2 if gated else weight_rows, gated, plan) <= RING_LIMIT
    if weight_rows >= 4096 and columns >= 1024:
        assert min(blocks, tiles) * split >= 120


def _operands(rows: int, features: int, columns: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    wide = torch.full((rows, columns + 64), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :columns] = torch.randn(rows, columns, device="cuda", generator=generator)
    weight = torch.randn(features, columns, device="cuda", generator=generator) * columns**-0.5
    bias = torch.randn(features, device="cuda", generator=generator)
    return wide[:, :columns], weight.bfloat16(), bias.bfloat16()


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@needs_hopper
@pytest.mark.parametrize(("features", "columns"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_against_float32(rows: int, features: int, columns: int) -> None:
    x, weight, bias = _operands(rows, features, columns, rows)
    want = x.float() @ weight.float().t() + bias.float()
    with kernels.use(linear="hopper"):
        assert _error(kernels.linear(x, weight, bias, torch.float32), want) < 2e-5
        assert _error(kernels.linear(x, weight, bias), want) < 4e-3
    plan = choose(rows, features, columns, False)
    poisoned = torch.full((rows, features), float("nan"), device="cuda", dtype=torch.float32)
    launch(x, weight, None, poisoned, plan)
    assert _error(poisoned, want - bias.float()) < 2e-5
    again = torch.empty_like(poisoned)
    launch(x, weight, None, again, plan)
    assert torch.equal(poisoned, again)


@needs_hopper
@pytest.mark.parametrize(("features", "columns"), [shape for shape in SHAPES if shape[0] % 2 == 0])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_against_the_composition(rows: int, features: int, columns: int) -> None:
    x, weight, bias = _operands(rows, features, columns, rows)
    gate, up = (x.float() @ weight.float().t() + bias.float()).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    with kernels.use(linear_silu_and_mul="hopper"):
        assert _error(kernels.linear_silu_and_mul(x, weight, bias), want) < 8e-3


@needs_hopper
@pytest.mark.parametrize(("features", "columns"), SHAPES)
def test_a_row_has_the_same_bits_alone_and_among_others(features: int, columns: int) -> None:
    x, weight, bias = _operands(64, features, columns, 7)
    with kernels.use(linear="hopper"):
        together = kernels.linear(x, weight, bias, torch.float32)
        for count in (1, 5, 8, 9, 16, 31, 40):
            first = 64 - count
            assert torch.equal(kernels.linear(x[first:], weight, bias, torch.float32), together[first:]), (
                count
            )


@needs_hopper
@pytest.mark.parametrize("width", [64, 1024, 4096, 5120, 16384])
@pytest.mark.parametrize("rows", [1, 5, 64, 300])
def test_norm_is_the_reference_to_the_bit_of_the_residual(rows: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x, residual, weight = (
        torch.randn(n, width, device="cuda", generator=generator).bfloat16() for n in (rows, rows, 1)
    )
    kept = residual.clone()
    with kernels.use(add_rms_norm="hopper"):
        got = kernels.add_rms_norm(x, residual, weight[0], 1e-6)
    with kernels.use(add_rms_norm="reference"):
        want = kernels.add_rms_norm(x, kept, weight[0], 1e-6)
    assert torch.equal(residual, kept)
    assert _error(got, want) < 2e-3


@needs_hopper
def test_norm_with_a_float32_weight_rounds_once() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    x = torch.randn(7, 4096, device="cuda", generator=generator).bfloat16()
    weight = 1 + 0.3 * torch.randn(4096, device="cuda", generator=generator)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    with kernels.use(rms_norm="hopper"):
        got = kernels.rms_norm(x, weight, 1e-6)
    assert got.dtype == x.dtype
    # Half a unit in the last place of bfloat16, and a little for the float32 arithmetic.
    assert bool(((got.double() - exact).abs() <= exact.abs() * 2.0**-8 * 1.01).all())


@needs_hopper
def test_dependent_launches_see_the_results_ahead() -> None:
    """A long chain in a graph, each kernel allowed to start before the one ahead has finished."""
    weights = [_operands(1, 4096, 4096, seed)[1] for seed in range(12)]
    start = torch.randn(4, 4096, device="cuda").bfloat16()
    norm = torch.ones(4096, device="cuda", dtype=torch.bfloat16)

    def chain(name: str) -> Tensor:
        residual, x = start.clone(), start
        with kernels.use(linear=name, add_rms_norm=name if name == "hopper" else "reference"):
            for weight in weights:
                x = kernels.linear(kernels.add_rms_norm(x, residual, norm, 1e-6), weight)
        return x

    want = chain("hopper")
    assert _error(want, chain("cublas")) < 3e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain("hopper")
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


@needs_hopper
def test_many_rows_go_to_the_library() -> None:
    x, weight, _ = _operands(FEW_ROWS + 1, 256, 128, 0)
    assert _error(kernels.linear(x, weight), x.float() @ weight.float().t()) < 4e-3
