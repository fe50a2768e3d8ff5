"""Products with fp8 weights: the plans and layouts of the Hopper kernels, and what these compute where there
is such a GPU.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cuda_build
from quickturn_kernels.ops.fp8_linear.hopper_launch import (
    HOPPER_BLOCK,
    ORDER,
    RING_LIMIT,
    UNITS,
    choose,
    geometry,
    groups_of,
    launch,
    permute_columns,
    shared_memory,
)
from quickturn_kernels.ops.fp8_linear.hopper_quantize import quantize
from quickturn_kernels.ops.linear import LinearWeight, prepare_fp8_linear
from quickturn_kernels.ops.linear.fp8 import BLOCK, FP8, dequantize, quantize_blocks, quantize_rows

SHAPES = [(6144, 4096), (1024, 2048), (1008, 1024), (144, 208), (64, 128), (4112, 336), (24576, 512)]
ROWS = (1, 3, 8, 9, 16, 17, 33, 64)

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
needs_compiler = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")


@needs_compiler
def test_compiles_without_a_gpu() -> None:
    assert cuda_build.library((9, 0)).quickturn_linear_fp8_few_rows is not None


def test_the_order_pairs_what_one_thread_multiplies() -> None:
    """Even bytes of thread q's four are columns 2q and 2q + 1, odd ones those eight further on."""
    assert sorted(ORDER) == list(range(16))
    for q in range(4):
        first, second, third, fourth = ORDER[4 * q : 4 * q + 4]
        assert (first, third) == (2 * q, 2 * q + 1)
        assert (second, fourth) == (2 * q + 8, 2 * q + 9)
    bytes_of = torch.arange(64, dtype=torch.uint8).view(2, 32).view(FP8)
    assert permute_columns(bytes_of).view(torch.uint8)[1].tolist() == [
        32 + base + column for base in (0, 16) for column in ORDER
    ]


@pytest.mark.parametrize(
    ("weight_rows", "columns"), [*SHAPES, (4096, 4096), (4096, 12288), (16, 64), (151936, 4096)]
)
def test_plans_cover_the_machine_and_fit_it(weight_rows: int, columns: int) -> None:
    for rows, gated in itertools.product((1, 8, 32, 64), (False, True)):
        if weight_rows % (32 if gated else 16):
            continue
        plan = choose(rows, weight_rows, columns, gated)
        assert plan.tile_rows % (32 if gated else 16) == 0
        assert plan.stages % groups_of(rows, plan.tile_rows) == 0
        assert plan.stages >= 2
        tiles = -(-weight_rows // plan.tile_rows)
        assert (tiles * plan.split if plan.split > 1 else min(plan.blocks, tiles)) <= UNITS
        features = weight_rows // 2 if gated else weight_rows
        assert shared_memory(rows, features, gated, plan) <= RING_LIMIT
        if weight_rows >= 4096 and columns >= 4096:
            assert min(plan.blocks, tiles * plan.split) >= 96


def _operands(
    rows: int, features: int, columns: int, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x between NaN, an e4m3 weight with blocks of unlike sizes, its scales, and a bias."""
    generator = torch.Generator("cuda").manual_seed(seed)
    wide = torch.full((rows, columns + 64), float("nan"), device="cuda", dtype=dtype)
    wide[:, :columns] = torch.randn(rows, columns, device="cuda", generator=generator)
    weight = torch.randn(features, columns, device="cuda", generator=generator) * columns**-0.5
    sizes = torch.rand(-(-features // BLOCK), -(-columns // BLOCK), device="cuda", generator=generator) + 0.1
    spread = sizes.repeat_interleave(BLOCK, 0)[:features].repeat_interleave(BLOCK, 1)[:, :columns]
    quantized, scale = quantize_blocks(weight * spread)
    bias = torch.randn(features, device="cuda", generator=generator)
    return wide[:, :columns], quantized, scale, bias.to(dtype)


def _full(weight: Tensor, scale: Tensor) -> Tensor:
    full = torch.empty(weight.shape, device=weight.device)
    dequantize(weight, scale, full)
    return full


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("features", "columns"), SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_few_rows_against_float32(rows: int, features: int, columns: int, dtype: torch.dtype) -> None:
    x, quantized, scale, bias = _operands(rows, features, columns, rows, dtype)
    by_row = scale[:1, :1].expand(features, 1).reshape(-1) * torch.linspace(0.5, 2, features, device="cuda")
    for scales in (scale, by_row):
        weight = prepare_fp8_linear(quantized, scales)
        want = x.float() @ _full(quantized, scales).t()
        poisoned = torch.full((rows, features), float("nan"), device="cuda")
        plan = choose(rows, features, columns, False)
        launch(x, weight, None, poisoned, plan)
        assert _error(poisoned, want) < 2e-5
        again = torch.empty_like(poisoned)
        launch(x, weight, None, again, plan)
        assert torch.equal(poisoned, again)
        assert _error(kernels.linear(x, weight, bias), want + bias.float()) < 4e-3
        if features % 32 == 0:
            gate, up = (want + bias.float()).chunk(2, -1)
            gated = kernels.linear_silu_and_mul(x, weight, bias)
            assert _error(gated, torch.nn.functional.silu(gate) * up) < 8e-3


@needs_hopper
def test_every_byte_is_its_value() -> None:
    """Each e4m3 number but NaN, multiplied by one."""
    everything = torch.arange(256, dtype=torch.uint8, device="cuda")
    everything[everything & 127 == 127] = 0
    weight = torch.zeros((256, 128), dtype=torch.uint8, device="cuda")
    weight[:, 77] = everything
    x = torch.zeros((2, 128), dtype=torch.bfloat16, device="cuda")
    x[1, 77] = 1.0
    prepared = prepare_fp8_linear(weight.view(FP8), torch.ones(256, device="cuda"))
    got = kernels.linear(x, prepared, None, torch.float32)
    assert got[0].abs().max() == 0
    assert torch.equal(got[1], everything.view(FP8).float())


@needs_hopper
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tile_rows", [16, 32, 48, 64, 96, 128, 160, 192])
def test_every_geometry(tile_rows: int, split: int, gated: bool) -> None:
    x, quantized, scale, _ = _operands(13, 1536, 2176, split, torch.bfloat16)
    weight = prepare_fp8_linear(quantized, scale)
    plan = geometry(1536, 2176, tile_rows, split)
    if plan is None or (gated and (tile_rows % 32 or tile_rows // 2 // split % 4)):
        pytest.skip("no such geometry")
    want = x.float() @ _full(quantized, scale).t()
    if gated:
        gate, up = want.chunk(2, -1)
        want = torch.nn.functional.silu(gate) * up
    step = groups_of(13, tile_rows)
    dtype = torch.bfloat16 if gated else torch.float32
    plans = [replace(plan, stages=stages) for stages in (step, 2 * step)]
    if split == 1:
        plans.append(replace(plan, blocks=5, stages=step))
    for one in plans:
        if shared_memory(13, want.shape[1], gated, one) > RING_LIMIT:
            continue
        out = torch.full(want.shape, float("nan"), device="cuda", dtype=dtype)
        launch(x, weight, None, out, one, gated=gated)
        assert _error(out, want) < (8e-3 if gated else 2e-5), one


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (70, 144), (333, 4096), (64, 12288)])
def test_quantised_activations(rows: int, columns: int, whole: bool, dtype: torch.dtype) -> None:
    x = _operands(rows, 16, columns, rows, dtype)[0]
    x[0] = 0
    padded = rows + 5
    got, scale = quantize(x, padded, whole)
    want, want_scale = quantize_rows(x, None if whole else BLOCK)
    assert got[rows:].float().abs().max() == 0
    torch.testing.assert_close(scale[:rows], want_scale, rtol=1e-6, atol=0)
    assert torch.equal(got[:rows].view(torch.uint8), permute_columns(want).view(torch.uint8))


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("features", "columns"), [(1536, 1024), (1024, 640), (256, 4096)])
@pytest.mark.parametrize("rows", [65, 128, 333, 2048])
def test_many_rows_are_the_quantised_product(
    rows: int, features: int, columns: int, dtype: torch.dtype
) -> None:
    x, quantized, scale, bias = _operands(rows, features, columns, rows, dtype)
    for scales, group in ((scale, BLOCK), (scale[0, :1].expand(features).contiguous(), None)):
        weight = prepare_fp8_linear(quantized, scales)
        x_quantized, x_scale = quantize_rows(x, group)
        across = x_scale.repeat_interleave(BLOCK, 1)[:, :columns] if group else x_scale
        want = (x_quantized.float() * across) @ _full(quantized, scales).t() + bias.float()
        assert _error(kernels.linear(x, weight, bias), want) < 4e-3
        assert _error(kernels.linear(x, weight, None, torch.float32), want - bias.float()) < 3e-3


@needs_hopper
def test_dependent_launches_see_the_results_ahead() -> None:
    """A chain in a graph, each kernel allowed to start before the one ahead has finished."""
    weights = []
    for seed in range(12):
        _, quantized, scale, _ = _operands(1, 4096, 4096, seed, torch.bfloat16)
        weights.append(prepare_fp8_linear(quantized, scale))
    start = torch.randn(4, 4096, device="cuda").bfloat16()

    def chain() -> Tensor:
        x = start
        for weight in weights:
            x = kernels.linear(x, weight) * 2
        return x

    want = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


@needs_hopper
def test_no_rows() -> None:
    weight = prepare_fp8_linear(*quantize_blocks(torch.randn(256, 128, device="cuda")))
    x = torch.empty(0, 128, device="cuda", dtype=torch.bfloat16)
    assert kernels.linear(x, weight).shape == (0, 256)
    assert kernels.linear_silu_and_mul(x, weight).shape == (0, 128)


@needs_hopper
def test_columns_that_dont_fit_stay_portable() -> None:
    x, quantized, scale, _ = _operands(5, 40, 200, 1, torch.bfloat16)
    weight: LinearWeight = prepare_fp8_linear(quantized[:, :200], scale)
    assert weight.layout != HOPPER_BLOCK
    x_quantized, x_scale = quantize_rows(x, BLOCK)
    across = x_scale.repeat_interleave(BLOCK, 1)[:, :200]
    want = (x_quantized.float() * across) @ _full(quantized, scale).t()
    assert _error(kernels.linear(x, weight, None, torch.float32), want) < 3e-3
