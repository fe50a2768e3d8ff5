"""The cost model is what its words say, and no dearer thing is ever cheaper."""

from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest

from quickturn.parallel.cost import (
    H200,
    Collective,
    Exchange,
    Hardware,
    Load,
    collective_seconds,
    decode_load,
    kernel_seconds,
    prefill_load,
    wire_bytes,
)
from quickturn.parallel.ops import CacheWork, ExpertWork, Merge, Op, Travel, Work
from quickturn.parallel.placement import Partial, Placed, Replicate

KINDS = get_args(Collective)
SIZES = [0.0, *(2.0**power for power in range(0, 34))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
def test_more_bytes_take_longer(kind: Collective, ranks: int) -> None:
    seconds = [collective_seconds(kind, ranks, size, H200) for size in SIZES]
    assert all(less <= more for less, more in pairwise(seconds))
    assert seconds[0] > 0 if ranks > 1 else seconds == [0.0] * len(SIZES)


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_take_longer(kind: Collective) -> None:
    for size in SIZES:
        seconds = [collective_seconds(kind, ranks, size, H200) for ranks in range(1, 17)]
        assert all(less <= more for less, more in pairwise(seconds)), size


@pytest.mark.parametrize("kind", KINDS)
def test_a_faster_machine_takes_less(kind: Collective) -> None:
    faster = replace(H200, link=2 * H200.link, memory=2 * H200.memory, compute=2 * H200.compute)
    for size in SIZES:
        assert collective_seconds(kind, 8, size, faster) <= collective_seconds(kind, 8, size, H200)
        assert kernel_seconds(size, 3 * size, faster) <= kernel_seconds(size, 3 * size, H200)


def test_the_terms_are_the_stated_ones() -> None:
    """Worked out by hand for 8 ranks and a message that no latency matters to, and for none."""
    large, terms = 8e9, H200.exchange("all_gather")
    link = H200.link * terms.efficiency
    assert collective_seconds("all_gather", 8, large, H200) == pytest.approx(5.4e-6 + 7e9 / link)
    assert collective_seconds("all_reduce", 8, large, H200) == pytest.approx(10.8e-6 + 14e9 / link)
    assert collective_seconds("all_reduce", 8, 0, H200) == pytest.approx(5.4e-6)
    assert wire_bytes("all_reduce", 8, large, H200) == pytest.approx(14e9)
    assert wire_bytes("all_reduce", 8, 16, H200) == pytest.approx(7 * 16)
    assert wire_bytes("all_to_all", 4, 16, H200) == pytest.approx(12)
    assert wire_bytes("reduce_scatter", 1, 16, H200) == 0
    assert kernel_seconds(H200.memory, 0, H200) == pytest.approx(1 + H200.launch)
    assert kernel_seconds(0, H200.compute, H200) == pytest.approx(1 + H200.launch)


def test_a_sum_then_shared_out_is_never_cheaper_than_shared_out_sums() -> None:
    """So that no search prefers an all-reduce where a reduce-scatter does."""
    for size in SIZES:
        for ranks in (2, 4, 8):
            assert collective_seconds("reduce_scatter", ranks, size, H200) <= collective_seconds(
                "all_reduce", ranks, size, H200
            )


def test_experts_are_touched_as_expected() -> None:
    experts = ExpertWork(here=16, count=128, top_k=8, bytes=10.0, operations=1.0)
    assert experts.touched(0) == 0
    assert experts.touched(1) == pytest.approx(16 * 8 / 128)
    assert experts.touched(1e6) == pytest.approx(16)
    touched = [experts.touched(tokens) for tokens in range(0, 300, 10)]
    assert all(less < more for less, more in pairwise(touched))
    work = Work(weights=5.0, experts=experts, kept=7.0)
    assert work.weight_bytes(1) == pytest.approx(5 + 10)
    assert work.held_bytes() == pytest.approx(5 + 160 + 7)


def test_caches_are_read_as_far_as_they_are_seen() -> None:
    load = decode_load(4, 1000)
    assert CacheWork(token_bytes=2.0).size(load) == 8000
    assert CacheWork(token_bytes=2.0, window=100).size(load) == 800
    assert CacheWork(request_bytes=3.0).size(load) == 12
    assert CacheWork(operations=1.0).work(load) == 4000
    assert CacheWork(token_bytes=2.0, operations=1.0, parts=4).size(load) == 2000
    assert CacheWork(token_bytes=2.0, operations=1.0, parts=4).work(load) == 1000
    prompt = Load(100, 1, 1, 100)
    assert CacheWork(token_bytes=2.0, parts=4).size(prompt) == 200
    assert Merge(4, 3.0, 5.0).size(load) == 4 * 3 * 4
    assert Merge(4, 3.0, 5.0).size(prompt) == 500
    assert CacheWork(operations=1.0).work(Load(100, 1, 1, 100)) == pytest.approx(100 * 100 / 2)


def test_rates_of_other_machines_can_be_given() -> None:
    slow = Hardware("slow", 1.0, 1.0, 0.0, 1.0, H200.exchanges)
    assert kernel_seconds(3.0, 2.0, slow) == pytest.approx(3.0)


def mixture(top_k: int) -> Op:
    """128 experts of 10 bytes and 3 operations a token on 16 ranks, 100 features."""
    work = Work(weights=5.0, experts=ExpertWork(8, 128, top_k, 10.0, 3.0))
    travel = Travel(top_k, Work(weights=7.0, operations=11.0), kept=2.0)
    return Op(Placed("mix", "moe", Replicate(), Partial()), 100, 100, work, travel=travel)


def test_a_token_travels_once_to_each_rank_of_its_experts() -> None:
    """Bytes worked out by hand: 2 a feature, there and back, and 8 an expert on the way there."""
    prompt, decoding = prefill_load(50), decode_load(50, 1000)
    assert mixture(4).messages(50, 16, prompt) == (50 * 4 * (200 + 32), 50 * 4 * 200)
    assert mixture(20).messages(50, 16, prompt) == (50 * 16 * (200 + 160), 50 * 16 * 200)
    assert mixture(4).messages(50, 16, decoding) == (50 * 16 * (200 + 32), 50 * 16 * 200)


def test_the_terms_of_a_mixture_whose_tokens_travel() -> None:
    """On machines on which one thing alone takes time."""
    op, prompt, decoding = mixture(4), prefill_load(50), decode_load(50, 1000)
    nothing = tuple((kind, Exchange(0.0, 0.0, 1.0)) for kind in KINDS)
    free = Hardware("free", 1e30, 1e30, 0.0, 1e30, nothing, 0.0)

    def times(hardware: Hardware, load: Load) -> tuple[float, float]:
        return op.travel_seconds(50, 16, load, hardware)

    assert times(free, prompt) == pytest.approx((0, 0), abs=1e-20)
    assert times(replace(free, launch=1.0), prompt) == pytest.approx((4, 0), abs=1e-20)
    assert times(replace(free, host=1.0), prompt) == pytest.approx((0, 1), abs=1e-20)
    assert times(replace(free, host=1.0), decoding) == pytest.approx((0, 0), abs=1e-20)
    started = tuple((kind, Exchange(float(kind == "all_to_all"), 0.0, 1.0)) for kind in KINDS)
    assert times(replace(free, exchanges=started), prompt) == pytest.approx((0, 3), abs=1e-20)
    assert times(replace(free, exchanges=started), decoding) == pytest.approx((0, 2), abs=1e-20)
    sent = 15 / 16 * (50 * 4 * 232 + 50 * 4 * 200 + 8 * 16)
    assert times(replace(free, link=1.0), prompt) == pytest.approx((0, sent))
    routed = 50 * 16 * 4 / 16 * 3 + 50 * 11
    assert times(replace(free, compute=1.0), prompt) == pytest.approx((routed, 0), abs=1e-20)
    rows = 50 * 4 * 432
    touched = op.work.experts.touched(800) * 10 if op.work.experts else 0.0
    assert times(replace(free, memory=1.0), prompt) == pytest.approx(
        (touched + 3 * rows + 7 + 50 * 400, 0), abs=1e-20
    )
