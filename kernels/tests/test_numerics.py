"""Every implementation that runs here against the reference, over every case of the numerics suite."""

import contextlib
from functools import partial

import pytest
import torch

from quickturn_kernels import numerics, platform, registry
from quickturn_kernels.numerics.check import Case, Result

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DEVICE = torch.device(platform.current().device)
RUNS_TRITON = DEVICE.type == "cuda" or platform.interpreter_works()
RUNS = [(case, name) for case in numerics.cases() for name in case.takers(DEVICE)]


@pytest.mark.parametrize(("case", "name"), RUNS, ids=[f"{case.op}-{name}-{case.name}" for case, name in RUNS])
def test_implementation_agrees_with_reference(case: Case, name: str, device: torch.device, seed: int) -> None:
    numerics.check(case, name, seed, device)


@pytest.mark.skipif(not RUNS_TRITON, reason="needs triton, and a GPU or a working interpreter")
def test_portable_tier_is_complete_for_dense_decoders() -> None:
    portable = {case.op for case, name in RUNS if name == "triton"}
    assert portable >= {
        "rms_norm",
        "add_rms_norm",
        "silu_and_mul",
        "embedding",
        "rotary_cache_write",
        "paged_attention_decode",
        "paged_attention_prefill",
        "sample",
    }


def test_suite_finds_a_wrong_element_and_an_unwritten_one(device: torch.device) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
        out[0, 0] += 0.1
        return out

    def unwritten(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        out[1:] = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)[1:]
        return out

    case = next(case for case in numerics.cases() if case.op == "rms_norm" and case.name == "5 x 100 float32")
    for function in (wrong, unwritten):
        registry.register("rms_norm", name="broken")(function)
        try:
            with pytest.raises(AssertionError, match="rms_norm=broken, case 5 x 100 float32, seed 3: out"):
                numerics.check(case, "broken", 3, device)
        finally:
            registry.unregister("rms_norm", "broken")


def test_suite_finds_a_race(device: torch.device) -> None:
    calls = 0

    def now_and_then(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
        out[0, 0] *= 1 + 1e-6 * (calls == 7)
        return out

    case = next(case for case in numerics.cases() if case.op == "rms_norm" and case.name == "5 x 100 float32")
    numerics.check_repeats(case, "reference", 3, device, 10)
    registry.register("rms_norm", name="broken")(now_and_then)
    try:
        with pytest.raises(AssertionError, match=f"{case.name}, seed 3: out of run 7 differs"):
            numerics.check_repeats(case, "broken", 3, device, 10)
    finally:
        registry.unregister("rms_norm", "broken")


def test_poisoned_memory_holds_nan() -> None:
    with numerics.poisoned():
        assert torch.empty(4).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_accept_is_used_for_outputs_that_need_not_be_close(device: torch.device) -> None:
    def run(verdict: bool, generator: torch.Generator, device: torch.device) -> Result:
        return Result({"out": torch.rand(1)}, {"out": lambda expected, actual: verdict})

    numerics.check(Case("rms_norm", "free", torch.float32, {}, partial(run, True)), "reference", 0, device)
    with pytest.raises(AssertionError, match="case strict"):
        numerics.check(
            Case("rms_norm", "strict", torch.float32, {}, partial(run, False)), "reference", 0, device
        )


@pytest.mark.parametrize(
    ("units", "roundings", "agrees"), [(2, 2, True), (3, 2, False), (3, 3, True), (4, 3, False)]
)
def test_an_element_may_part_by_a_unit_in_the_last_place_a_rounding(
    units: int, roundings: int, agrees: bool, device: torch.device
) -> None:
    runs = iter((64.0, 64.0 * (1 + units * torch.finfo(torch.bfloat16).eps)))

    def run(generator: torch.Generator, device: torch.device) -> Result:
        return Result({"out": torch.tensor([next(runs)], dtype=torch.bfloat16)}, roundings=roundings)

    case = Case("rms_norm", "rounded", torch.bfloat16, {}, run)
    with contextlib.nullcontext() if agrees else pytest.raises(AssertionError, match="case rounded"):
        numerics.check(case, "reference", 0, device)


def test_a_token_on_the_edge_of_min_p_may_be_kept_or_not(device: torch.device) -> None:
    # With this seed a token's weight is its row's min-p but for the last bit, and it would be drawn.
    case = next(case for case in numerics.cases() if case.op == "sample" and case.name == "min-p")
    for name in case.takers(device):
        numerics.check(case, name, 1879884211, device)
