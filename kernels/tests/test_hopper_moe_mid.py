"""Mixtures of experts over up to 64 tokens on Hopper: what is left to these launches, the shared expert among
Triton's products anywhere, and what comes out where there is such a GPU.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cuda_build, numerics, platform

if not platform.has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.moe import ExpertWeights, SharedExpert, hopper_mid, route_with, router_logits
from quickturn_kernels.ops.moe.reference import activate, moe_reference
from quickturn_kernels.ops.moe.triton import FEW, down, gate_up, shape_for
from quickturn_kernels.ops.moe.triton_tiles import make_tiles

HOPPER = platform.current().capability == (9, 0) and cuda_build.available((9, 0))
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and its compiler")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def _random(device: torch.device | str, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=device).mul_(shape[-1] ** -0.5).to(dtype)


def _plain(matrix: Tensor) -> LinearWeight:
    return LinearWeight((matrix.shape[0], matrix.shape[1]), matrix.dtype, PLAIN, (matrix,))


def _experts(
    device: torch.device | str, count: int, hidden: int, inner: int, *, oss: bool = False, fp8: bool = False
) -> ExpertWeights:
    if fp8:
        blocks = -(-hidden // 128)
        return kernels.prepare_experts(
            torch.randn(count, 2 * inner, hidden, device=device).to(FP8),
            torch.randn(count, hidden, inner, device=device).to(FP8),
            gate_up_scale=(0.5 + torch.rand(count, 2 * inner // 128, blocks, device=device)) * hidden**-0.5,
            down_scale=(0.5 + torch.rand(count, blocks, inner // 128, device=device)) * inner**-0.5,
        )
    return kernels.prepare_experts(
        _random(device, count, 2 * inner, hidden),
        _random(device, count, hidden, inner),
        gate_up_bias=_random(device, count, 2 * inner) * 5 if oss else None,
        down_bias=_random(device, count, hidden) * 5 if oss else None,
        activation="gpt_oss" if oss else "silu",
    )


def _shared(device: torch.device | str, hidden: int, inner: int) -> SharedExpert:
    gate_up, down = _random(device, 2 * inner, hidden), _random(device, hidden, inner)
    return SharedExpert(_plain(gate_up), _plain(down), _random(device, 1, hidden))


def _off(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)).max())


def test_what_is_left_to_these_launches() -> None:
    experts, shared = _experts("cpu", 4, 64, 32), _shared("cpu", 64, 32)
    assert hopper_mid.takes(experts, 2, shared)
    assert not hopper_mid.takes(experts, 17, shared)
    assert not hopper_mid.takes(_experts("cpu", 513, 8, 8), 2, None)
    assert not hopper_mid.takes(_experts("cpu", 4, 12, 8), 2, None)
    assert not hopper_mid.takes(experts, 2, replace(shared, gate=torch.zeros(1, 72).to(BF16)[:, 1:65]))
    for rows, taken in ((0, False), (1, True), (64, True), (65, False)):
        assert hopper_mid.takes_rows(torch.zeros(rows, 64, dtype=BF16)) == taken
    wide = torch.zeros(3, 80, dtype=BF16)
    assert hopper_mid.takes_rows(wide[:, 8:72])
    assert not hopper_mid.takes_rows(wide[:, 4:68])
    assert not hopper_mid.takes_rows(torch.zeros(3, 68, dtype=BF16)[:, :64])
    assert not hopper_mid.takes_rows(torch.zeros(3, 64))


def test_which_shared_experts_are_one_among_the_others() -> None:
    experts, shared = _experts("cpu", 4, 128, 128), _shared("cpu", 128, 128)
    assert hopper_mid.joins(experts, shared)
    assert hopper_mid.joins(experts, replace(shared, gate=None))
    assert not hopper_mid.joins(experts, None)
    assert not hopper_mid.joins(experts, _shared("cpu", 128, 64))
    assert not hopper_mid.joins(_experts("cpu", 4, 128, 128, oss=True), shared)
    assert not hopper_mid.joins(_experts("cpu", 4, 128, 128, fp8=True), shared)
    assert not hopper_mid.joins(experts, replace(shared, down=_plain(torch.zeros(128, 128))))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_shared_expert_among_the_products(dtype: torch.dtype, device: torch.device, seed: int) -> None:
    torch.manual_seed(seed)
    tokens, hidden, inner, count, top = 9, 64, 40, 6, 3
    experts = kernels.prepare_experts(
        _random(device, count, 2 * inner, hidden, dtype=dtype),
        _random(device, count, hidden, inner, dtype=dtype),
    )
    shared = _shared(device, hidden, inner)
    first, second = (matrix.tensors[0].to(dtype) for matrix in (shared.gate_up, shared.down))
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weights, chosen = kernels.route(torch.randn(tokens, count, device=device), top)
    chosen[3] = -1
    everybody = torch.full((tokens, 1), count, dtype=torch.int32, device=device)
    shape = shape_for(tokens * top, experts, dtype)
    tiles = make_tiles(torch.cat((chosen, everybody), 1), count + 1, shape.rows)
    between = gate_up(x, experts, tiles, top + 1, shape, first)
    results = down(between, experts, tiles, shape, second).view(tokens, top + 1, hidden)
    limit = 1e-5 if dtype == torch.float32 else 4e-2
    assert _off(results[:, top], activate(x @ first.mT, "silu") @ second.mT) < limit
    real = chosen >= 0
    summed = torch.where(real, weights, 0.0)[..., None] * results[:, :top].float().nan_to_num()
    want = moe_reference(x, experts, weights, chosen, None)
    assert _off(summed.sum(1)[real[:, 0]], want[real[:, 0]]) < limit


@pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")
def test_compiles_without_a_gpu() -> None:
    built = cuda_build.library((9, 0))
    assert built.quickturn_moe_mid_sort is not None
    assert built.quickturn_moe_mid_combine is not None


def _router(
    hidden: int, count: int, routing: kernels.Routing, *, biased: bool, corrected: bool
) -> kernels.Router:
    return kernels.Router(
        kernels.prepare_linear(_random("cuda", count, hidden)),
        routing,
        _random("cuda", count) if biased else None,
        torch.randn(count, device="cuda") if corrected else None,
    )


FORMS = {
    "joined": (256, 2048, 512, 512, kernels.Routing(8)),
    "dense": (64, 512, 128, 256, kernels.Routing(4, normalize=False, scale=1.7)),
    "alone": (128, 256, 192, 0, kernels.Routing(8)),
    "oss": (32, 512, 128, 0, kernels.Routing(4, "softmax_after")),
    "fp8": (32, 512, 256, 0, kernels.Routing(4)),
    "corrected": (512, 264, 64, 64, kernels.Routing(16, "sigmoid", scale=2.5)),
    "groups": (64, 512, 64, 64, kernels.Routing(8, "sigmoid", groups=8, top_groups=4)),
    "few": (3, 192, 96, 96, kernels.Routing(3)),
}
"""Experts, hidden, inner, that of the shared expert, how they are chosen."""


def _layer(form: str) -> tuple[kernels.Router, ExpertWeights, SharedExpert | None]:
    count, hidden, inner, shared, routing = FORMS[form]
    router = _router(hidden, count, routing, biased=form == "oss", corrected=form in ("corrected", "groups"))
    experts = _experts("cuda", count, hidden, inner, oss=form == "oss", fp8=form == "fp8")
    return router, experts, _shared("cuda", hidden, shared) if shared else None


@needs_hopper
@pytest.mark.parametrize("tokens", [3, 8, 17, 64])
@pytest.mark.parametrize("form", FORMS)
def test_against_the_reference(form: str, tokens: int, seed: int) -> None:
    torch.manual_seed(seed + tokens)
    router, experts, shared = _layer(form)
    hidden = experts.hidden
    wide = torch.full((tokens, hidden + 16), float("nan"), device="cuda", dtype=BF16)
    wide[:, :hidden] = torch.randn(tokens, hidden, device="cuda")
    x = wide[:, :hidden]
    logits = router_logits(x, router)
    positions = torch.arange(tokens, device="cuda")
    positions[1::3] = -1
    for known in (None, positions):
        # The same logits for both: a choice may hang on their last bits.
        with kernels.use(route="reference", moe="reference"):
            weights, chosen = route_with(logits, router.routing, router.correction, known)
            want = kernels.moe(x, experts, weights, chosen, shared=shared)
        real = slice(None) if known is None else known >= 0
        with numerics.poisoned():
            got = kernels.moe_block(x, router, experts, shared=shared, positions=known)
            given = kernels.moe(x, experts, weights, chosen, shared=shared)
        assert got.isfinite().all()
        assert _off(got[real], want[real]) < 1.2e-2
        assert _off(given[real], want[real]) < 1.2e-2
        late = hopper_mid.choose(x, router, experts.count, known)
        assert torch.equal(got, hopper_mid.launch(x, experts, late, shared, known, early=False))
        before = torch.randn(tokens, hidden + 16, device="cuda").to(BF16)[:, :hidden]
        stream = before.clone()
        hopper_mid.launch(x, experts, late, shared, known, stream)
        assert torch.equal(stream, (before.float() + got.float()).to(BF16))


@needs_hopper
def test_some_choices_are_nobodys(seed: int) -> None:
    torch.manual_seed(seed)
    _, experts, shared = _layer("joined")
    x = torch.randn(33, 2048, device="cuda").to(BF16)
    weights, chosen = kernels.route(torch.randn(33, 256, device="cuda"), 8)
    chosen[::2, 0], chosen[1::3, -1], chosen[5] = -1, 258, -7
    weights[::2, 0] = float("nan")
    with kernels.use(moe="reference"):
        want = kernels.moe(x, experts, weights, chosen, shared=shared)
    with numerics.poisoned():
        assert _off(kernels.moe(x, experts, weights, chosen, shared=shared), want) < 1.2e-2
        nobody = kernels.moe(x, experts, weights, torch.full_like(chosen, -1))
    assert (nobody == 0).all()


@needs_hopper
def test_on_the_residual_stream(seed: int) -> None:
    torch.manual_seed(seed)
    router, experts, shared = _layer("joined")
    assert kernels.residual_moe_rows(router, experts, shared) == 64
    start, branch = (torch.randn(5, 2048, device="cuda").to(BF16) for _ in range(2))
    norm = (1 + 0.1 * torch.randn(2048, device="cuda")).to(BF16)
    for added in (branch, None):
        got, want = start.clone(), start.clone()
        with numerics.poisoned():
            kernels.residual_moe_block(got, added, norm, 1e-6, router, experts, shared=shared)
        x = (
            kernels.rms_norm(want, norm, 1e-6)
            if added is None
            else kernels.add_rms_norm(added, want, norm, 1e-6)
        )
        want += kernels.moe_block(x, router, experts, shared=shared)
        assert torch.equal(got, want)


@needs_hopper
def test_a_token_has_the_same_bits_in_any_company(seed: int) -> None:
    torch.manual_seed(seed)
    router, experts, shared = _layer("joined")
    x = torch.randn(64, 2048, device="cuda").to(BF16)
    choice = hopper_mid.choose(x, router, 256, None)
    assert choice.logits is not None
    all_of_them = hopper_mid.launch(x, experts, choice, shared)
    for rows in (1, 5, 15, 16, 40):
        fewer = replace(choice, logits=choice.logits[:rows])
        assert torch.equal(hopper_mid.launch(x[:rows], experts, fewer, shared), all_of_them[:rows])


@needs_hopper
def test_nan_in_one_token_stays_there(seed: int) -> None:
    torch.manual_seed(seed)
    router, experts, shared = _layer("joined")
    x = torch.randn(6, 2048, device="cuda").to(BF16)
    want = kernels.moe_block(x, router, experts, shared=shared)
    x[2] = float("nan")
    got = kernels.moe_block(x, router, experts, shared=shared)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(got[others], want[others])
    assert got[2].isnan().all()


@needs_hopper
@pytest.mark.parametrize("tokens", [4, 40])
def test_chain_in_a_graph_sees_the_results_ahead(tokens: int, seed: int) -> None:
    """Each kernel may start before the one ahead has finished, and they use the same memory in turn."""
    torch.manual_seed(seed)
    routing = kernels.Routing(4)
    layers = [
        (
            _router(1024, 64, routing, biased=False, corrected=False),
            _experts("cuda", 64, 1024, 256),
            _shared("cuda", 1024, 256 if index % 3 else 128),
        )
        for index in range(6)
    ]
    start = torch.randn(tokens, 1024, device="cuda").to(BF16)
    norm = torch.ones(1024, device="cuda", dtype=BF16)

    def chain(early: bool) -> Tensor:
        residual = start.clone()
        for router, experts, shared in layers:
            x = kernels.rms_norm(residual, norm, 1e-6)
            choice = hopper_mid.choose(x, router, experts.count, None)
            hopper_mid.launch(x, experts, choice, shared, None, residual, early=early)
            x = kernels.rms_norm(residual, norm, 1e-6)
            choice = hopper_mid.choose(x, router, experts.count, None)
            residual = hopper_mid.launch(x, experts, choice, shared, early=early)
        return residual

    want = chain(False)
    chain(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(True)
    for _ in range(50):
        got.fill_(float("nan"))
        graph.replay()
        assert torch.equal(got, want)


def test_the_second_products_own_tiles_are_as_high() -> None:
    """Both products share the tiles."""
    assert hopper_mid.WIDE_DOWN.rows == FEW.rows
    assert hopper_mid.WIDE_DOWN.step == FEW.step
