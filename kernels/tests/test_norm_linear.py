"""Products with a norm ahead or an addition behind: their reference, the layout in which Hopper's kernels
hand the normed rows to a product, and what those kernels compute where there is such a GPU.
"""

import ctypes
import itertools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cuda_build
from quickturn_kernels.numerics.norm_linear import EPS, FoldInputs, FoldShape, apart, fold_inputs
from quickturn_kernels.ops.linear.hopper_launch import RING_LIMIT, geometry
from quickturn_kernels.ops.norm_linear.hopper_launch import (
    MAX_COLUMNS,
    MAX_NORM_ROWS,
    choose,
    launch_add,
    launch_norm,
    rows_that_pay,
    shared_memory,
)

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


def normed(given: FoldInputs) -> Tensor:
    """What is multiplied, by the formula."""
    wide = given.x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    if given.norm_weight.dtype == FP32:
        return (wide * given.norm_weight.double()).to(given.x.dtype)
    return wide.to(given.x.dtype) * given.norm_weight


def error(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over that of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_reference_is_the_formula(dtype: torch.dtype, wide: bool, bias: bool, seed: int) -> None:
    given = fold_inputs(FoldShape(3, 200, 64, wide, bias, dtype), torch.Generator().manual_seed(seed), CPU)
    before = given.x.clone()
    bound = 2e-6 if dtype == FP32 else 8e-3
    with kernels.use(**{"*": "reference"}):
        call = (given.x, given.norm_weight, EPS, given.weight, given.bias)
        out, gated = kernels.norm_linear(*call), kernels.norm_linear_silu_and_mul(*call)
        logits = kernels.norm_linear(*call, out_dtype=FP32)
    bias_term = 0 if given.bias is None else given.bias.double()
    product = normed(given).double() @ given.weight.double().t() + bias_term
    gate, up = product.chunk(2, -1)
    assert error(out, product) < bound
    assert error(gated, torch.nn.functional.silu(gate) * up) < 2 * bound
    assert error(logits, product) < bound
    assert logits.dtype == FP32
    assert torch.equal(given.x, before)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_reference_adds_in_place_and_rounds_in_turn(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = fold_inputs(FoldShape(2, 96, 40, bias=True, dtype=dtype), generator, CPU)
    stream = apart(2, 40, dtype, generator, CPU)
    with kernels.use(linear="reference"):
        want = stream + kernels.linear(given.x, given.weight, given.bias)
        kernels.linear_add(given.x, given.weight, given.bias, stream)
    assert torch.equal(stream, want)


def test_nothing_is_faster_without_kernels_for_it() -> None:
    weight = kernels.LinearWeight((64, 64), FP32, "plain", (torch.zeros(64, 64),))
    assert kernels.norm_linear_rows(weight) == kernels.linear_add_rows(weight) == 0


@pytest.mark.parametrize("columns", [64, 1000, 1024, 2048, MAX_COLUMNS])
@pytest.mark.parametrize("weight_rows", [64, 1024, 4096, 6144, 9216, 24576, 151936])
def test_plans_fit_beside_the_normed_rows(weight_rows: int, columns: int) -> None:
    for rows, gated in itertools.product(range(1, MAX_NORM_ROWS + 1), (False, True)):
        plan = choose(rows, weight_rows, columns, gated)
        assert (plan.tile_rows, plan.split, plan.blocks) == geometry(weight_rows, columns)
        assert plan.stages >= 2
        features = weight_rows // 2 if gated else weight_rows
        assert shared_memory(rows, features, columns, gated, plan) <= RING_LIMIT
    assert rows_that_pay(weight_rows, columns) <= MAX_NORM_ROWS


LAYOUT = """
#include "operand_layout.h"
extern "C" {
int place(int rows, int row, int chunk) {
  return quickturn::chunk_place(quickturn::chunk_pitch(rows), row, chunk);
}
int bytes(int rows, int slices) { return quickturn::operand_bytes(quickturn::chunk_pitch(rows), slices); }
unsigned long long descriptor(int rows, int address) {
  return quickturn::chunks_operand(address, quickturn::chunk_pitch(rows));
}
int warps(int vectors) { return quickturn::virtual_warps(vectors); }
int vector(int warp, int lane, int half, int warps) { return quickturn::vector_of(warp, lane, half, warps); }
}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels' own arithmetic, compiled for the host."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder: Path = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(LAYOUT)
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{cuda_build.source_directory()}"]
    subprocess.run([*command, "-o", folder / "layout.so", folder / "layout.cpp"], check=True)
    library = ctypes.CDLL(str(folder / "layout.so"))
    library.descriptor.restype = ctypes.c_ulonglong
    return library


def read_by_product(descriptor: int, row: int, part: int) -> int:
    """The address at which a product finds columns 8 `part` to 8 `part` + 8 of one of its 8 rows, as the
    instruction set defines it for K-major operands without a swizzle.
    """
    assert descriptor >> 62 == 0
    return ((descriptor & 0x3FFF) << 4) + row * 16 + part * ((descriptor >> 16 & 0x3FFF) << 4)


@pytest.mark.parametrize("rows", range(1, MAX_NORM_ROWS + 1))
def test_products_read_what_the_norm_wrote(layout: ctypes.CDLL, rows: int) -> None:
    slices, base = 5, 3 * 1024
    size = layout.bytes(rows, slices)
    assert size % 1024 == 0
    written = {
        base + layout.place(rows, row, chunk): (row, chunk)
        for row in range(rows)
        for chunk in range(8 * slices)
    }
    assert len(written) == rows * 8 * slices
    assert all(base <= at <= base + size - 16 for at in written)
    for product, row, part in itertools.product(range(4 * slices), range(rows), range(2)):
        descriptor = layout.descriptor(rows, base + product * 2 * layout.place(rows, 0, 1))
        assert written[read_by_product(descriptor, row, part)] == (row, product * 2 + part)


@pytest.mark.parametrize("rows", range(1, MAX_NORM_ROWS + 1))
def test_a_row_is_written_to_all_banks(layout: ctypes.CDLL, rows: int) -> None:
    """Eight lanes write eight chunks of a row at once: to eight of the eight groups of four banks."""
    for row, first in itertools.product(range(rows), range(0, 64, 8)):
        assert len({layout.place(rows, row, first + i) // 16 % 8 for i in range(8)}) == 8


@pytest.mark.parametrize("vectors", [1, 25, 64, 65, 125, 128, 320, 512])
def test_every_vector_of_a_row_is_summed_once_where_the_norm_kernel_sums_it(
    layout: ctypes.CDLL, vectors: int
) -> None:
    warps = layout.warps(vectors)
    threads = ((vectors + 1) // 2 + 31) // 32 * 32  # norm_threads() of norm.cuh
    assert warps * 32 == threads
    assert warps <= 8
    places = itertools.product(range(warps), range(32), range(2))
    found = {(warp, lane, half): layout.vector(warp, lane, half, warps) for warp, lane, half in places}
    assert all(at == warp * 32 + lane + half * threads for (warp, lane, half), at in found.items())
    assert sorted(at for at in found.values() if at < vectors) == list(range(vectors))


SHAPES = [(6144, 4096), (4096, 1024), (24576, 4096), (1000, 1024), (152, 1000), (64, 64), (4104, 2048)]
SHAPES += [(256, 2560), (96, 328)]


def on_gpu(shape: FoldShape, seed: int) -> FoldInputs:
    """Random operands on the GPU."""
    return fold_inputs(shape, torch.Generator("cuda").manual_seed(seed), torch.device("cuda"))


@needs_hopper
@pytest.mark.parametrize(("features", "columns"), SHAPES)
@pytest.mark.parametrize("rows", range(1, MAX_NORM_ROWS + 1))
def test_norm_and_product_have_the_bits_of_their_ops(rows: int, features: int, columns: int) -> None:
    for wide, out_dtype in itertools.product((False, True), (BF16, FP32)):
        given = on_gpu(FoldShape(rows, columns, features, wide, bias=wide), rows)
        before = given.x.clone()
        with kernels.use(rms_norm="hopper", linear="hopper"):
            x = kernels.rms_norm(given.x, given.norm_weight, EPS)
            want = kernels.linear(x, given.weight, given.bias, out_dtype)
        product = normed(given).float() @ given.weight.float().t()
        assert error(want, product + (0 if given.bias is None else given.bias.float())) < 1e-2
        out = torch.full_like(want, float("nan"))
        launch_norm(given.x, given.norm_weight, EPS, given.weight, given.bias, out)
        assert torch.equal(out, want), (wide, out_dtype, error(out, want))
        assert torch.equal(given.x, before)


@needs_hopper
@pytest.mark.parametrize(("features", "columns"), [shape for shape in SHAPES if shape[0] % 16 == 0])
@pytest.mark.parametrize("rows", range(1, MAX_NORM_ROWS + 1))
def test_gated_has_the_bits_of_its_ops(rows: int, features: int, columns: int) -> None:
    for wide, bias in itertools.product((False, True), repeat=2):
        given = on_gpu(FoldShape(rows, columns, features, wide, bias), rows)
        call = (given.x, given.norm_weight, EPS, given.weight, given.bias)
        with kernels.use(**{"*": "hopper"}, norm_linear_silu_and_mul="reference"):
            want = kernels.norm_linear_silu_and_mul(*call)
        with kernels.use(norm_linear_silu_and_mul="hopper"), kernels.counted() as calls:
            got = kernels.norm_linear_silu_and_mul(*call)
        assert +calls == {("norm_linear_silu_and_mul", "hopper"): 1}
        assert torch.equal(got, want)


@needs_hopper
@pytest.mark.parametrize(("features", "columns"), [*SHAPES, (4096, 12288), (1024, 3072), (4096, 4096)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8])
def test_addition_has_the_bits_of_its_ops(rows: int, features: int, columns: int) -> None:
    for bias in (False, True):
        given = on_gpu(FoldShape(rows, columns, features, bias=bias), rows)
        stream = apart(rows, features, BF16, torch.Generator("cuda").manual_seed(1), torch.device("cuda"))
        want = stream.clone()
        with kernels.use(linear_add="reference", linear="hopper"):
            kernels.linear_add(given.x, given.weight, given.bias, want)
        with kernels.use(linear_add="hopper"), kernels.counted() as calls:
            kernels.linear_add(given.x, given.weight, given.bias, stream)
        assert +calls == {("linear_add", "hopper"): 1}
        assert torch.equal(stream, want)
        assert bool(stream.as_strided((rows, 24), (features + 24, 1), features).isnan().all())


@needs_hopper
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_every_split_and_number_of_blocks(split: int) -> None:
    for rows, columns in itertools.product((1, 4), (1000, 4096)):
        given = on_gpu(FoldShape(rows, columns, 640, bias=True), split)
        assert given.bias is not None
        want = normed(given).float() @ given.weight.float().t() + given.bias.float()
        for blocks, early in ((132, True), (3, True), (3, False)):
            plan = choose(rows, 640, columns, False)
            plan = replace(plan, split=split, blocks=blocks, stages=3, early=early)
            out = torch.full((rows, 640), float("nan"), device="cuda")
            launch_norm(given.x, given.norm_weight, EPS, given.weight, given.bias, out, plan=plan)
            assert error(out, want) < 4e-3
            stream = torch.zeros(rows, 640, device="cuda", dtype=BF16)
            launch_add(normed(given), given.weight, given.bias, stream, plan=plan)
            assert error(stream, want) < 5e-3


def step(start: Tensor, weights: list[tuple[Tensor, Tensor, Tensor, Tensor]], norm: Tensor) -> Tensor:
    """A decode step without attention: the stream is read by all blocks of a kernel, then changed."""
    stream = start.clone()
    for qkv, o, gate_up, down in weights:
        x = kernels.norm_linear(stream, norm, EPS, qkv)
        kernels.linear_add(x[:, : o.shape[1]], o, None, stream)
        x = kernels.norm_linear_silu_and_mul(stream, norm, EPS, gate_up)
        kernels.linear_add(x, down, None, stream)
    return kernels.norm_linear(stream, norm, EPS, weights[0][0], None, FP32)


@needs_hopper
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_dependent_launches_see_the_results_ahead(rows: int) -> None:
    """A long chain in a graph, each kernel allowed to start before the one ahead has finished."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def matrix(features: int, columns: int) -> Tensor:
        values = torch.randn(features, columns, device="cuda", generator=generator)
        return (values * columns**-0.5).bfloat16()

    weights = [
        (matrix(3072, 2048), matrix(2048, 2048), matrix(8192, 2048), matrix(2048, 4096)) for _ in range(6)
    ]
    start = torch.randn(rows, 2048, device="cuda", generator=generator).bfloat16()
    norm = torch.ones(2048, device="cuda", dtype=BF16)
    names = ("norm_linear", "norm_linear_silu_and_mul", "linear_add")
    with kernels.use(**{"*": "hopper"}, **dict.fromkeys(names, "reference")):
        want = step(start, weights, norm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with kernels.use(**dict.fromkeys(names, "hopper")):
        step(start, weights, norm)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = step(start, weights, norm)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


@needs_hopper
@pytest.mark.parametrize(
    "change", [{"rows": 5}, {"rows": 9}, {"width": 12288}, {"width": 100}, {"features": 100}], ids=str
)
def test_what_the_kernels_dont_take_is_composed(change: dict[str, int]) -> None:
    sizes = {"rows": 2, "width": 256, "features": 128} | change
    given = on_gpu(FoldShape(**sizes), 3)  # type: ignore[arg-type]
    want = normed(given).float() @ given.weight.float().t()
    out = kernels.norm_linear(given.x, given.norm_weight, EPS, given.weight)
    assert error(out, want) < 6e-3
    stream = torch.zeros(sizes["rows"], sizes["features"], device="cuda", dtype=BF16)
    kernels.linear_add(normed(given), given.weight, None, stream)
    assert error(stream, want) < 6e-3
