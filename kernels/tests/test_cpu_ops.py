"""The compiled CPU kernels against the reference tier, at every instruction-set level that this processor
has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cpu_native
from quickturn_kernels.ops.sampling.noise import gumbel

if not cpu_native.AVAILABLE:
    pytest.skip("the CPU extension is not built", allow_module_level=True)

from quickturn_kernels import _cpu

kernels.load()

LEVELS = ("base", "avx2", "avx512", "amx")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    best = _cpu.isa()
    if not _cpu.use_isa(request.param):
        pytest.skip(f"no {request.param}")
    yield request.param
    _cpu.use_isa(best)


@pytest.fixture(params=range(2))
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    print(f"seed {request.param}")
    return torch.Generator().manual_seed(request.param)


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def reference(op: str, *args: object) -> Tensor:
    return kernels.ops()[op].implementations["reference"].function(*args)


def compiled(op: str, *args: object) -> Tensor:
    return kernels.ops()[op].implementations["cpu"].function(*args)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    if tolerance is None:
        tolerance = 2e-5 if expected.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (7, 64), (3, 33), (600, 576), (0, 64)])
def test_norms(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(generator, *shape, dtype=dtype)
    weight = random(generator, shape[1], dtype=dtype)
    assert_near(compiled("rms_norm", x, weight, 1e-5), reference("rms_norm", x, weight, 1e-5))
    residual = random(generator, *shape, dtype=dtype)
    expected_residual, untouched = residual.clone(), x.clone()
    expected = reference("add_rms_norm", x, expected_residual, weight, 1e-5)
    assert_near(compiled("add_rms_norm", x, residual, weight, 1e-5), expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, untouched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (5, 24), (300, 1536)])
def test_silu_and_mul(generator: torch.Generator, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(generator, shape[0], 2 * shape[1], dtype=dtype) * 4
    x[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0])
    assert_near(compiled("silu_and_mul", x), reference("silu_and_mul", x))
    strided = random(generator, shape[0], 2 * shape[1] + 8, dtype=dtype)[:, : 2 * shape[1]]
    assert_near(compiled("silu_and_mul", strided), reference("silu_and_mul", strided))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 40, 300])
def test_embedding(generator: torch.Generator, dtype: torch.dtype, count: int) -> None:
    weight = random(generator, 200, 96, dtype=dtype)
    ids = torch.randint(-1, 200, (count,), generator=generator)
    assert torch.equal(compiled("embedding", ids, weight), reference("embedding", ids, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [5, 64, 1000, 49152])
def test_greedy(generator: torch.Generator, dtype: torch.dtype, size: int) -> None:
    logits = random(generator, 6, size, dtype=dtype)
    logits[1, 2] = logits[1, 4] = 9.0  # a tie: the first
    logits[2, 3] = float("nan")
    logits[3, 3] = float("inf")
    logits[4, :] = float("-inf")
    rows = torch.zeros(6)
    params = kernels.SamplingTensors(rows, rows, rows, rows, rows, rows, all_greedy=True)
    tokens = kernels.sample(logits, params).tokens
    assert tokens.tolist()[1:5] == [2, -1, -1, -1]
    assert tokens[0] == logits[0].argmax()
    assert tokens[5] == logits[5].argmax()


@pytest.fixture
def few_threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads kernels may use; afterwards it is as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int


SHAPES = (
    Shape(9, 3, 64, 16),
    Shape(4, 4, 32, 64),
    Shape(8, 1, 128, 32),
    Shape(4, 2, 80, 10),
    Shape(34, 2, 16, 5),
)


@dataclass(frozen=True)
class Paged:
    """A cache of two layers' blocks, poisoned where no token lies."""

    k: Tensor
    v: Tensor
    tables: Tensor
    contexts: Tensor


def paged(generator: torch.Generator, shape: Shape, contexts: list[int], dtype: torch.dtype) -> Paged:
    most = max(-(-context // shape.block_tokens) for context in contexts) + 1
    blocks = most * len(contexts)
    arena = torch.full(
        (blocks, 2, 2, shape.block_tokens, shape.kv_heads, shape.head_dim), float("nan"), dtype=dtype
    )
    order = torch.randperm(blocks, generator=generator).int().reshape(len(contexts), most)
    for row, context in enumerate(contexts):
        for position in range(context):
            block, offset = int(order[row, position // shape.block_tokens]), position % shape.block_tokens
            arena[block, 1, :, offset] = random(generator, 2, shape.kv_heads, shape.head_dim, dtype=dtype)
        order[row, -(-context // shape.block_tokens) :] = -(1 << 30)
    return Paged(arena[:, 1, 0], arena[:, 1, 1], order, torch.tensor(contexts, dtype=torch.int32))


EXTRAS = ((0, False, 0.0), (7, False, 0.0), (37, True, 0.0), (0, True, 5.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "sink", "softcap"), EXTRAS)
def test_decode(
    generator: torch.Generator, dtype: torch.dtype, shape: Shape, window: int, sink: bool, softcap: float
) -> None:
    contexts = [1, 0, 16, 17, 130, 300, 5]
    cache = paged(generator, shape, contexts, dtype)
    q = random(generator, len(contexts), shape.heads + 2, shape.head_dim, dtype=dtype)[:, : shape.heads]
    sinks = random(generator, shape.heads) if sink else None
    args = (q, cache.k, cache.v, cache.tables, cache.contexts, 0.2, window, sinks, softcap, 300)
    expected = reference("paged_attention_decode", *args)
    assert_near(compiled("paged_attention_decode", *args), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_of_one_row_is_cut_over_threads(generator: torch.Generator, dtype: torch.dtype) -> None:
    shape = Shape(9, 3, 64, 64)
    cache = paged(generator, shape, [3001], dtype)
    q = random(generator, 1, shape.heads, shape.head_dim, dtype=dtype)
    args = (q, cache.k, cache.v, cache.tables, cache.contexts, 0.125, 0, None, 0.0, 3001)
    assert_near(compiled("paged_attention_decode", *args), reference("paged_attention_decode", *args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("window", "sink", "softcap"), EXTRAS)
def test_prefill(
    generator: torch.Generator, dtype: torch.dtype, shape: Shape, window: int, sink: bool, softcap: float
) -> None:
    contexts, queries = [1, 0, 40, 150, 200, 64, 33], [1, 2, 40, 3, 90, 0, 17]
    cache = paged(generator, shape, contexts, dtype)
    start = torch.tensor([0, *queries]).cumsum(0).int()
    q = random(generator, int(start[-1]) + 3, shape.heads + 2, shape.head_dim, dtype=dtype)[:, : shape.heads]
    sinks = random(generator, shape.heads) if sink else None
    args = (q, cache.k, cache.v, cache.tables, start, cache.contexts, 90, 0.2, window, sinks, softcap, 200)
    expected = reference("paged_attention_prefill", *args)
    assert_near(compiled("paged_attention_prefill", *args), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("window", "sink", "softcap"), [(0, False, 0.0), (37, True, 0.0), (700, True, 5.0)])
def test_few_queries_behind_many_keys(
    generator: torch.Generator,
    threads: int,
    window: int,
    sink: bool,
    softcap: float,
    few_threads: Callable[[int], None],
    level: str,
) -> None:
    """Through tiles their keys are shared out among threads; any number of queries fills its lanes."""
    if threads > 1 and level != "amx":
        pytest.skip("whole units whatever there are")
    few_threads(threads)
    shape, contexts, dtype = Shape(9, 3, 64, 64), [1203, 95], torch.bfloat16
    cache = paged(generator, shape, contexts, dtype)
    sinks = random(generator, shape.heads) if sink else None
    for queries in ([15, 1], [1, 0], [33, 17], [48, 64], [90, 3]):
        start = torch.tensor([0, *queries]).cumsum(0).int()
        q = random(generator, int(start[-1]), shape.heads, shape.head_dim, dtype=dtype)
        most = max(queries)
        args = (q, cache.k, cache.v, cache.tables, start, cache.contexts, most, 0.2, window, sinks, softcap)
        expected = reference("paged_attention_prefill", *args, 1203)
        assert_near(compiled("paged_attention_prefill", *args, 1203), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_rotary(generator: torch.Generator, dtype: torch.dtype, normed: bool, rotary_dim: int) -> None:
    shape, tokens = Shape(9, 3, 64, 16), 50
    fused = random(generator, tokens, 15, 64, dtype=dtype)
    table = random(generator, 100, rotary_dim)
    positions = torch.randint(0, 100, (tokens,), generator=generator)
    slots = torch.randperm(8 * 16, generator=generator)[:tokens]
    slots[5] = -1
    positions[5] = 1 << 40
    weights = [random(generator, 64, dtype=dtype) if normed else None for _ in range(2)]
    results = []
    for run in (reference, compiled):
        q, k, v = fused.clone().split([9, 3, 3], dim=1)
        k_before = k.clone()
        cache = torch.full((8, 2, 16, shape.kv_heads, 64), 7.0, dtype=dtype)
        written = cache[:, 0], cache[:, 1], slots, *weights, 1e-5, 1.0, 1.0
        run("rotary_cache_write", q, k, v, positions, table, *written)
        assert torch.equal(k, k_before)
        q[5] = 0
        results.append((q, cache))
    assert_near(results[1][0], results[0][0])
    assert_near(results[1][1], results[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("size", [1, 63, 64, 1001, 20000])
def test_draw(generator: torch.Generator, size: int, filters: bool, dtype: torch.dtype) -> None:
    """The reference's tokens, unless its two best are level; of peaked rows, which need little noise, and
    flat ones.
    """
    rows = 40
    scale = torch.logspace(-2, 1, rows)[:, None]
    logits = (random(generator, rows, size + 7) * scale).to(dtype)[:, :size]
    logits[5] = float("-inf")
    logits[6, 0] = float("nan")
    share = torch.rand(3, rows, generator=generator)
    params = kernels.SamplingTensors(
        temperature=torch.where(share[0] < 0.1, 0.0, 2 * share[0]),
        top_k=(share[1] * 50).int() if filters else torch.zeros(rows, dtype=torch.int32),
        top_p=share[2].clamp(min=0.01) if filters else torch.ones(rows),
        min_p=(share[1] * 0.3) if filters else torch.zeros(rows),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        positions=torch.randint(2**40, (rows,), generator=generator),
        no_filters=not filters,
    )
    sampling = kernels.ops()["sample"].implementations
    expected = sampling["reference"].function(logits, params, None).tokens
    actual = sampling["cpu"].function(logits, params, None).tokens
    assert expected[5:7].tolist() == actual[5:7].tolist() == [-1, -1]
    for row in (expected != actual).nonzero()[:, 0].tolist():
        pair = torch.stack((expected[row], actual[row]))
        heat = params.temperature[row].clamp(min=1e-5)
        noise = gumbel(params.seeds[row : row + 1], params.positions[row : row + 1], size)[0]
        scores = (logits[row].float() / heat + noise)[pair]
        assert abs(float(scores[0] - scores[1])) < 1e-4 / min(1.0, float(heat)), row
