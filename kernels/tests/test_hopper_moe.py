"""Mixtures of experts on Hopper: that the kernels compile here, and what they compute where there is such a
GPU.
"""

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cuda_build, numerics, platform
from quickturn_kernels.ops.fp8_linear.hopper_launch import HOPPER_BLOCK, ORDER
from quickturn_kernels.ops.linear.fp8 import dequantize
from quickturn_kernels.ops.moe import ExpertWeights, SharedExpert, hopper_grouped, hopper_route, triton_tiles
from quickturn_kernels.ops.moe.hopper_few import Stream, launch, takes, takes_norm, takes_rows

HOPPER = platform.current().capability == (9, 0) and cuda_build.available((9, 0))
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and its compiler")
BF16 = torch.bfloat16

SHAPES = [
    (2048, 512, 256, 8, 512),
    (2048, 768, 128, 8, 0),
    (4096, 1536, 16, 4, 2048),
    (192, 64, 5, 3, 128),
    (1040, 2560, 6, 2, 48),
]
"""(hidden, inner, experts, top, inner of the shared expert)"""

TOKENS = (1, 2, 3, 33)
"""From three on these are the launches of test_hopper_moe_mid.py, or the portable kernels."""


@pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")
def test_compiles_without_a_gpu() -> None:
    assert cuda_build.library((9, 0)).quickturn_moe_few is not None
    assert cuda_build.library((9, 0)).quickturn_moe_few_fp8 is not None
    assert cuda_build.library((9, 0)).quickturn_moe_grouped is not None


def test_norms_that_cant_be_read_16_bytes_at_a_time_are_left() -> None:
    for dtype in (BF16, torch.float32):
        weight = torch.ones(72, dtype=dtype)
        assert takes_norm(weight)
        assert not takes_norm(weight[1:65])
        assert not takes_norm(torch.ones(128, dtype=dtype)[::2])
    assert not takes_norm(torch.ones(64, dtype=torch.float16))


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").mul_(shape[-1] ** -0.5).to(BF16)


def _layer(
    shape: tuple[int, int, int, int, int], routing: kernels.Routing | None = None, biased: bool = False
) -> tuple[kernels.Router, ExpertWeights, SharedExpert | None]:
    hidden, inner, experts, top, shared = shape
    made = kernels.prepare_experts(
        _random(experts, 2 * inner, hidden),
        _random(experts, hidden, inner),
        gate_up_bias=_random(experts, 2 * inner) * 10 if biased else None,
        down_bias=_random(experts, hidden) * 10 if biased else None,
        activation="gpt_oss" if biased else "silu",
    )
    router = kernels.Router(
        kernels.prepare_linear(_random(experts, hidden)),
        routing or kernels.Routing(top),
        _random(experts) if biased else None,
        torch.randn(experts, device="cuda") if routing is not None and routing.scoring == "sigmoid" else None,
    )
    if shared == 0:
        return router, made, None
    return (
        router,
        made,
        kernels.prepare_shared_expert(
            _random(2 * shared, hidden), _random(hidden, shared), _random(1, hidden)
        ),
    )


def _fp8(
    shape: tuple[int, int, int, int, int],
) -> tuple[ExpertWeights, SharedExpert | None]:
    """Random e4m3 bytes with random scales."""
    hidden, inner, experts, _, shared = shape

    def stored(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").to(torch.float8_e4m3fn)

    def scale(*size: int) -> Tensor:
        blocks = [-(-side // 128) for side in size[-2:]]
        return (0.5 + torch.rand(*size[:-2], *blocks, device="cuda")) * size[-1] ** -0.5

    def both(*size: int) -> tuple[Tensor, Tensor]:
        return stored(*size), scale(*size)

    gate_up, down = both(experts, 2 * inner, hidden), both(experts, hidden, inner)
    made = kernels.prepare_experts(gate_up[0], down[0], gate_up_scale=gate_up[1], down_scale=down[1])
    if shared == 0:
        return made, None
    gate_up, down = both(2 * shared, hidden), both(hidden, shared)
    return made, kernels.prepare_shared_expert(
        gate_up[0], down[0], _random(1, hidden), gate_up_scale=gate_up[1], down_scale=down[1]
    )


def _dequantized(weight: kernels.LinearWeight) -> Tensor:
    out = torch.empty(weight.shape, dtype=torch.float32, device="cuda")
    matrix, scale = weight.tensors
    if weight.layout == HOPPER_BLOCK:
        columns = torch.empty_like(matrix)
        columns.view(torch.uint8).unflatten(1, (-1, 16))[:, :, list(ORDER)] = matrix.view(
            torch.uint8
        ).unflatten(1, (-1, 16))
        matrix = columns
    dequantize(matrix, scale, out)
    return out.to(BF16)


def _off(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)).max())


@needs_hopper
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_block_against_the_reference(shape: tuple[int, int, int, int, int], tokens: int, seed: int) -> None:
    torch.manual_seed(seed + tokens)
    router, experts, shared = _layer(shape)
    x = torch.randn(tokens, shape[0], device="cuda").to(BF16)
    assert takes(experts, router, shared)
    assert takes_rows(x, experts, router, shared) == (tokens <= 2)
    with kernels.use(moe_block="reference", route="reference", moe="reference", linear="cublas"):
        want = kernels.moe_block(x, router, experts, shared=shared)
    with kernels.use(moe_block="hopper"):
        got = kernels.moe_block(x, router, experts, shared=shared)
        assert torch.equal(got, kernels.moe_block(x, router, experts, shared=shared))
    assert _off(got, want) < 1.2e-2


@needs_hopper
@pytest.mark.parametrize(
    ("experts", "equal"),
    [(64, (10, 11)), (256, (16, 17, 18, 20, 23)), (300, (30, 31, 37, 39)), (512, tuple(range(32, 48)))],
)
def test_of_equal_logits_each_is_chosen_once(experts: int, equal: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    router, made, _ = _layer((64, 64, experts, 8, 0))
    x = torch.randn(1, 64, device="cuda").to(BF16)
    # All of these are ahead of the others, and the first of them are taken.
    router.weight.tensors[0][list(equal)] = x[0] * 0.5
    with kernels.use(moe_block="reference", route="reference", moe="reference", linear="cublas"):
        want = kernels.moe_block(x, router, made)
    with kernels.use(moe_block="hopper"):
        assert _off(kernels.moe_block(x, router, made), want) < 1.2e-2


@needs_hopper
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    "shape", [(2048, 512, 64, 8, 512), (4096, 1536, 8, 4, 0), (384, 128, 5, 3, 256), (1152, 1152, 4, 1, 128)]
)
def test_fp8_against_the_reference(shape: tuple[int, int, int, int, int], tokens: int, seed: int) -> None:
    torch.manual_seed(seed + tokens)
    experts, shared = _fp8(shape)
    x = torch.randn(tokens, shape[0], device="cuda").to(BF16)
    router = kernels.Router(kernels.prepare_linear(_random(shape[2], shape[0])), kernels.Routing(shape[3]))
    assert takes(experts, router, shared)
    assert takes_rows(x, experts, router, shared)
    plain = None
    if shared is not None:
        # The op for a dense fp8 product may round x to fp8; the experts' products don't.
        plain = kernels.prepare_shared_expert(
            _dequantized(shared.gate_up), _dequantized(shared.down), shared.gate
        )
    with kernels.use(moe_block="reference", route="reference", moe="reference", linear="cublas"):
        want = kernels.moe_block(x, router, experts, shared=plain)
    with kernels.use(moe_block="hopper"):
        got = kernels.moe_block(x, router, experts, shared=shared)
        assert torch.equal(got, kernels.moe_block(x, router, experts, shared=shared))
    assert _off(got, want) < 1.2e-2


@needs_hopper
@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("wide", [torch.float32, BF16])
@pytest.mark.parametrize("tokens", [1, 2])
def test_on_the_residual_stream(tokens: int, wide: torch.dtype, added: bool, seed: int) -> None:
    torch.manual_seed(seed + tokens)
    router, experts, shared = _layer(SHAPES[0])
    start = torch.randn(tokens, 2048, device="cuda").to(BF16)
    branch = torch.randn(tokens, 2048, device="cuda").to(BF16) if added else None
    norm = (1 + 0.1 * torch.randn(2048, device="cuda")).to(wide)
    want, got = start.clone(), start.clone()
    with kernels.use(
        residual_moe_block="reference",
        moe_block="reference",
        route="reference",
        moe="reference",
        linear="cublas",
    ):
        kernels.residual_moe_block(want, branch, norm, 1e-6, router, experts, shared=shared)
    with numerics.poisoned():
        kernels.residual_moe_block(got, branch, norm, 1e-6, router, experts, shared=shared)
    base = start if branch is None else start + branch
    assert _off(got.float() - base.float(), want.float() - base.float()) < 2e-2
    assert (got - want).abs().max() <= 0.0625


@needs_hopper
@pytest.mark.parametrize(
    "routing",
    [
        kernels.Routing(6, "sigmoid", scale=2.5),
        kernels.Routing(4, normalize=False),
        kernels.Routing(4, "softmax_after"),
    ],
)
def test_rules_and_biases(routing: kernels.Routing, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (256, 192, 40, routing.top_k, 0)
    router, experts, _ = _layer(shape, routing, biased=routing.scoring == "softmax_after")
    x = torch.randn(2, 256, device="cuda").to(BF16)
    positions = torch.tensor([-1, 7], device="cuda")
    with kernels.use(moe_block="reference", route="reference", moe="reference", linear="cublas"):
        want = kernels.moe_block(x, router, experts, positions=positions)
    with kernels.use(moe_block="hopper"):
        got = kernels.moe_block(x, router, experts, positions=positions)
    assert (got[0] == 0).all()
    real = positions >= 0
    assert _off(got[real], want[real]) < 1.2e-2


@needs_hopper
@pytest.mark.parametrize("same", [False, True])
def test_a_token_alone_has_the_bits_it_has_in_company(same: bool, seed: int) -> None:
    torch.manual_seed(seed)
    router, experts, shared = _layer(SHAPES[0])
    x = torch.randn(2, 2048, device="cuda").to(BF16)
    if same:
        x[1] = x[0]
    norm = torch.rand(2048, device="cuda").to(BF16)
    together = kernels.moe_block(x, router, experts, shared=shared)
    stream = x.clone()
    kernels.residual_moe_block(stream, None, norm, 1e-6, router, experts, shared=shared)
    for token in (0, 1):
        alone = x[token : token + 1].clone()
        assert torch.equal(kernels.moe_block(alone, router, experts, shared=shared)[0], together[token])
        kernels.residual_moe_block(alone, None, norm, 1e-6, router, experts, shared=shared)
        assert torch.equal(alone[0], stream[token])


@needs_hopper
def test_everybody_takes_the_same_experts_or_nobody_any(seed: int) -> None:
    torch.manual_seed(seed)
    router, experts, shared = _layer((512, 128, 64, 2, 128))
    x = torch.randn(1, 512, device="cuda").to(BF16).expand(2, -1).contiguous()
    with kernels.use(moe_block="reference", route="reference", moe="reference", linear="cublas"):
        want = kernels.moe_block(x, router, experts, shared=shared)
    assert _off(kernels.moe_block(x, router, experts, shared=shared), want) < 1.2e-2
    nobody = torch.full((2,), -1, device="cuda")
    with numerics.poisoned():
        assert kernels.moe_block(x, router, experts, shared=None, positions=nobody).eq(0).all()


@needs_hopper
def test_nan_in_one_token_stays_there(seed: int) -> None:
    torch.manual_seed(seed)
    router, experts, shared = _layer(SHAPES[0])
    x = torch.randn(2, 2048, device="cuda").to(BF16)
    want = kernels.moe_block(x, router, experts, shared=shared)
    x[1] = float("nan")
    got = kernels.moe_block(x, router, experts, shared=shared)
    assert torch.equal(got[0], want[0])
    assert got[1].isnan().all()


@needs_hopper
def test_chain_in_a_graph_sees_the_results_ahead(seed: int) -> None:
    """Each kernel may start before the one ahead has finished, and they use the same memory in turn."""
    torch.manual_seed(seed)
    layers = [_layer((1024, 256, 64, 4, 256)) for _ in range(6)]
    start = torch.randn(2, 1024, device="cuda").to(BF16)
    norm = torch.ones(1024, device="cuda", dtype=BF16)

    def chain(early: bool) -> Tensor:
        residual, x = start.clone(), start
        for router, experts, shared in layers:
            launch(x, router, experts, shared, None, Stream(residual, norm, 1e-6), early=early)
            x = kernels.rms_norm(residual, norm, 1e-6)
            x = launch(x, router, experts, shared, None, early=early)
        return x

    want = chain(False)
    graph = torch.cuda.CUDAGraph()
    chain(True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


@needs_hopper
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("tokens", "shape", "biased"),
    [
        (65, (2048, 512, 256, 8, 512), False),
        (700, (1024, 192, 24, 4, 0), False),
        (300, (264, 64, 7, 3, 64), True),
        (1, (128, 128, 4, 2, 0), False),
        (2000, (512, 128, 3, 1, 0), True),
    ],
)
def test_grouped_products(
    tokens: int, shape: tuple[int, int, int, int, int], biased: bool, rows: int, seed: int
) -> None:
    torch.manual_seed(seed + tokens)
    _, experts, shared = _layer(shape, biased=biased)
    wide = torch.full((tokens, shape[0] + 64), float("nan"), device="cuda", dtype=BF16)
    wide[:, : shape[0]] = torch.randn(tokens, shape[0], device="cuda")
    x = wide[:, : shape[0]]
    weights, chosen = kernels.route(torch.randn(tokens, shape[2], device="cuda"), shape[3])
    chosen[1::5, 0] = -1
    with kernels.use(moe="reference"):
        want = kernels.moe(x, experts, weights, chosen, shared=shared)
    with numerics.poisoned():
        got = hopper_grouped.moe(x, experts, weights, chosen, shared, rows)
    real = want.norm(dim=1) > 0
    assert _off(got[real], want[real]) < 1.2e-2
    assert (got[~real] == 0).all()
    assert torch.equal(got, hopper_grouped.moe(x, experts, weights, chosen, shared, rows))


@needs_hopper
@pytest.mark.parametrize(("pairs", "experts"), [(1, 4), (1000, 256), (1024, 7), (70000, 256), (5000, 512)])
@pytest.mark.parametrize("size", [16, 128])
def test_tiles_are_those_of_the_portable_kernels(pairs: int, experts: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    chosen = torch.randint(-1, experts + 1, (pairs, 1), device="cuda", dtype=torch.int32)
    with numerics.poisoned():
        want, got = (
            triton_tiles.make_tiles(chosen, experts, size),
            hopper_route.make_tiles(chosen, experts, size),
        )
    used = int(want.used)
    assert int(got.used) == used
    for mine, theirs in ((got.experts, want.experts), (got.rows, want.rows), (got.pairs, want.pairs)):
        assert torch.equal(mine[:used], theirs[:used])
