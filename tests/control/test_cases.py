"""Cases of lost reuse and bad scheduling seen elsewhere, each without a model, on a simulated clock."""

from random import Random

import numpy as np
import pytest
import quickturn_control as qc
from control_driver import Driver, Setup
from control_sim import FULL, STATE, UNIT, Sim, prompt


def joined(*parts: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    return np.concatenate(parts).astype(np.int32)


@pytest.mark.parametrize("suffix", [40, 376, 1296])
def test_shared_prefix_with_different_long_suffixes(suffix: int) -> None:
    """The second sharer leaves a state where the two part, and the third finds it."""
    sim = Sim(60)
    shared = prompt(6476, 1)
    sim.answer(joined(shared, prompt(suffix, 2)))
    sim.answer(joined(shared, prompt(suffix, 3)))
    third = sim.answer(joined(shared, prompt(suffix, 4)))
    assert third >= 6476 // UNIT * UNIT


def test_boundary_hint_serves_the_second_sharer() -> None:
    """The runtime says where system prompt and tools end: then the second sharer hits already."""
    sim = Sim(60)
    shared = prompt(6476, 1)
    sim.answer(joined(shared, prompt(900, 2)), boundaries=[6476])
    assert sim.answer(joined(shared, prompt(900, 3))) == 6476 // UNIT * UNIT


def test_short_shared_prefix() -> None:
    """480 shared tokens: the size of a state has no say in what is cacheable."""
    sim = Sim(40)
    shared = prompt(480, 1)
    for seed in (2, 3):
        sim.answer(joined(shared, prompt(100, seed)))
    assert sim.answer(joined(shared, prompt(100, 4))) >= 448
    assert sim.scheduler.stats()["min_cacheable_tokens"] == UNIT


def test_sparse_group_never_raises_the_hit() -> None:
    """Drafts, states and windows: every turn starts from the right prefix, by the device oracle."""
    for seed in range(30):
        setup = Setup(
            (("full", 4, 0), ("window", 4, 10), ("state", 1, 0)), 60, draft_tokens=3, max_step_tokens=32
        )
        driver = Driver(setup, Random(f"chained runs {seed}"))
        history = [seed % 4 + 20] * 23
        reusable = 0
        for turn in range(6):
            driver.ask(history)
            track = driver.device.tracks[driver.last_id]
            while driver.device.tracks:
                driver.plan()
                driver.apply()
            # At least up to the end of the last prompt.
            assert track.cached >= reusable
            reusable = len(track.prompt) // setup.block_tokens * setup.block_tokens
            history = [*track.host, *range(turn, turn + 5)]
        driver.drain()


def test_generated_tokens_are_reusable() -> None:
    """100 in, 50 out, then those 150 and 50 more. The last sampled token was never computed."""
    for groups in ([FULL], [FULL, STATE]):
        sim = Sim(40, groups)
        first = prompt(100, 1)
        sim.answer(first, 50)
        answer = np.full(50, 7, np.int32)
        cached = sim.answer(joined(first, answer, prompt(50, 2)))
        assert cached == (100 + 49) // UNIT * UNIT
        assert sim.scheduler.stats()["ceiling_tokens"] == cached


def test_no_state_is_published_before_its_step_was_applied() -> None:
    """While the step that writes a block or state is out, nobody can match it."""
    sim = Sim(40, pipeline_depth=2, max_step_tokens=4096)
    tokens = prompt(1000, 1)
    scheduler = sim.scheduler
    sim.add(tokens)
    first = scheduler.plan(0.0)
    second = scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    assert first.num_tokens + second.num_tokens < 1000
    assert scheduler.match(tokens) == 0
    scheduler.apply(qc.StepResult(first.step, np.empty(0, np.int32)))
    # Its keys and values are known now, and so is the state at its end, which the second step only reads.
    assert scheduler.match(tokens) == first.num_tokens
    scheduler.apply(qc.StepResult(second.step, np.empty(0, np.int32)))


def test_five_hundred_retractions() -> None:
    """A pool that is always short: every return starts from the right state, by the device oracle."""
    total = 0
    for seed in range(400):
        driver = Driver(
            Setup((("full", 2, 0), ("state", 1, 0)), 13, max_step_tokens=12, max_requests=6),
            Random(f"short {seed}"),
            twin=False,
        )
        for _ in range(500):
            driver.any_operation()
        driver.drain()
        total += int(driver.scheduler.stats()["retractions"])
        if total >= 500:
            return
    raise AssertionError(f"only {total} retractions")


def test_request_that_needs_nearly_the_whole_pool() -> None:
    """What can fit progresses; what can't is refused at once, with the numbers."""
    sim = Sim(10, [FULL])
    with pytest.raises(
        ValueError, match=r"needs 501 full blocks \(50 a slab\), but the whole cache has 10 slabs"
    ):
        sim.add(prompt(500 * UNIT, 1))
    sim.answer(prompt(200 * UNIT, 2))
    small = [sim.add(prompt(3000, 10 + i), 40) for i in range(4)]
    large = sim.add(prompt(499 * UNIT, 3), 32)
    sim.run()
    assert all(sim.ended[number] == qc.LENGTH for number in [*small, large])
    assert sim.retracted.count(large) == 0
    computed = sim.scheduler.stats()["computed_tokens"]
    assert computed < 1.02 * (200 * UNIT + 4 * 3040 + 499 * UNIT + 32)


def test_hybrid_admission_counts_every_group() -> None:
    """Ten states fill ten slabs: an eleventh request waits instead of starting what it can't go on with."""
    sim = Sim(10)
    numbers = [sim.add(prompt(200, seed), 300) for seed in range(11)]
    for _ in range(40):
        sim.step()
    assert len(sim.slot_of) < 11
    sim.run()
    assert all(sim.ended[number] == qc.LENGTH for number in numbers)


def test_thinking_dropped_from_history() -> None:
    """The next turn doesn't extend prompt + answer: the checkpoint at the end of the prompt counts."""
    sim = Sim(60)
    first = prompt(5000, 1)
    sim.answer(first, 700, session="a")
    next_turn = joined(first, prompt(300, 2))  # the thinking is gone
    assert sim.answer(next_turn, session="a") == 5000 // UNIT * UNIT
    # An exact extension reuses the answer too.
    third = joined(next_turn, np.full(4, 7, np.int32), prompt(200, 3))
    assert sim.answer(third, session="a") == 5300 // UNIT * UNIT


def test_client_goes_away() -> None:
    """Cancelled after the first token: private blocks and state come back within a step, the prefix stays."""
    sim = Sim(60)
    number = sim.add(prompt(3000, 1), 32_000)
    while number not in sim.token_times:
        sim.step()
    assert sim.scheduler.cancel(number)
    sim.step()
    stats = sim.scheduler.stats()
    assert stats["requests_running"] == 0
    assert stats["requests_cancelled"] == 1
    assert sim.ended[number] == qc.CANCELLED
    assert sim.scheduler.match(prompt(3000, 1)) == 3000 // UNIT * UNIT
    sim.scheduler.reset_prefix_cache()
    assert sim.scheduler.stats()["slabs_free"] == 60


@pytest.mark.parametrize("groups", [[FULL], [FULL, STATE]], ids=["full", "hybrid"])
def test_sixteen_children_of_one_cold_prefix(groups: list[qc.GroupConfig]) -> None:
    """1,024 shared tokens are computed once; the others attach while they are in flight."""
    sim = Sim(80, groups)
    shared = prompt(1024, 1)
    children = [sim.add(joined(shared, prompt(128, 2 + i))) for i in range(16)]
    sim.run()
    computed = sim.scheduler.stats()["computed_tokens"]
    assert computed <= 1024 + 16 * (128 + 4) + 15 * UNIT
    assert sum(sim.cached[child] == 1024 for child in children) == 15
    assert sim.now < 1.0


def test_follower_does_not_wait_for_ever() -> None:
    """The one that computes the prefix goes away: the follower goes on by itself."""
    sim = Sim(200, [FULL], policy=qc.Policy(share_wait=0.05, min_tps_per_user=0.0))
    leader = sim.add(prompt(40_000, 1))
    sim.step()
    follower = sim.add(joined(prompt(40_000, 1)[:30_000], prompt(50, 2)))
    sim.step()
    assert sim.scheduler.cancel(leader)
    sim.run()
    assert sim.ended[follower] == qc.LENGTH


def test_session_waits_on_a_tool_while_others_fill_the_pool() -> None:
    """30 s of other prompts: the session's blocks go down a tier and are quickly back."""
    sim = Sim(60, [FULL], tiers=[qc.TierConfig("host", [8000])], transfer_seconds=1.25e6 / 25e9)
    context = prompt(50_000, 1)
    start = sim.now
    first = sim.add(context, 100, session="a")
    sim.run()
    cold = sim.token_times[first][0] - start
    assert sim.scheduler.hold("a", 60.0)
    for i in range(30):
        sim.answer(prompt(10_000, 100 + i), session=f"other{i}")
        sim.idle(1.0)
    start = sim.now
    again = sim.add(joined(context, np.full(100, 7, np.int32), prompt(100, 2)), session="a")
    sim.run()
    warm = sim.token_times[again][0] - start
    assert sim.cached[again] >= 50_000 // UNIT * UNIT
    assert warm < 0.2 * cold


def test_hold_keeps_a_session_on_the_device_without_a_lower_tier() -> None:
    """What waits for a tool outlives what is younger and held by nobody, within the bound."""
    kept = {}
    for held in (True, False):
        sim = Sim(40, [FULL])
        context = prompt(40_000, 1)
        sim.answer(context, session="a")
        if held:
            assert sim.scheduler.hold("a", 200.0)
        for i in range(12):
            sim.answer(prompt(10_000, 100 + i))
            sim.idle(10.0)
        kept[held] = sim.scheduler.match(joined(context, prompt(10, 2)))
    assert kept[True] == 40_000 // UNIT * UNIT
    assert kept[False] < kept[True]


def test_superseded_tails_go_first() -> None:
    """A rewritten tail of the same session gives way before an older session that may go on."""
    sim = Sim(11, [FULL])
    other = prompt(8000, 5)
    sim.answer(other, session="other")
    base = prompt(6000, 1)
    sim.answer(joined(base, prompt(6000, 2)), session="a")
    sim.answer(joined(base, prompt(6000, 3)), session="a")  # the first tail is left behind
    sim.answer(prompt(12_000, 6), session="third")
    assert sim.scheduler.match(joined(other, prompt(10, 7))) == 8000 // UNIT * UNIT
    assert sim.scheduler.match(joined(base, prompt(6000, 2))) < 12_000 // UNIT * UNIT


def test_long_prompt_beside_a_decoding_user() -> None:
    """A decodes with 4,094 in, B brings 65,535: A's gaps stay within twice the steady one, B loses little."""
    alone = Sim(60, [FULL])
    number = alone.add(prompt(65_535, 2))
    alone.run()
    b_alone = alone.token_times[number][0]

    sim = Sim(60, [FULL])
    a = sim.add(prompt(4094, 1), 20_000)
    while len(sim.token_times.get(a, [])) < 200:
        sim.step()
    steady = float(np.median(np.diff(sim.token_times[a][50:])))
    start, at = sim.now, len(sim.token_times[a])
    b = sim.add(prompt(65_535, 2))
    while b not in sim.token_times:
        sim.step()
    gaps = np.diff(sim.token_times[a][at:])
    assert np.quantile(gaps, 0.99) <= 2.05 * steady
    assert sim.token_times[b][0] - start <= 1.3 * b_alone


def test_promised_tokens_per_second() -> None:
    """At 70 tokens/s for everyone a step takes at most 1/70 s, and prefills still get through."""
    sim = Sim(100, [FULL], policy=qc.Policy(min_tps_per_user=70.0))
    users = [sim.add(prompt(2000, i), 400) for i in range(8)]
    while any(user not in sim.token_times for user in users):
        sim.step()
    warm = len(sim.token_times[users[0]])
    late = sim.add(prompt(30_000, 99), 4)
    while late not in sim.token_times:
        sim.step()
    gaps = np.diff(sim.token_times[users[0]][warm:])
    assert np.quantile(gaps, 0.95) <= 1.05 / 70


def test_admission_stops_where_the_promise_would_break() -> None:
    """As many users as the promise allows, not one more."""

    def crowded(plan: qc.StepPlan) -> float:
        return 0.002 + 0.001 * plan.num_decode_rows + plan.num_tokens * 1e-6

    sim = Sim(200, [FULL], seconds=crowded, policy=qc.Policy(min_tps_per_user=50.0))
    for i in range(40):
        sim.add(prompt(300, i), 300)
        sim.step()
        sim.step()
    for _ in range(200):
        sim.step()
    assert 14 <= len(sim.slot_of) <= 22  # 18 would be exact
    sim.run()
    assert len(sim.ended) == 40


def test_cached_first_within_the_fairness_bound() -> None:
    """A cached prompt passes a cold one of 50k that came just before it, but not for ever."""
    sim = Sim(200, [FULL], max_requests=1, policy=qc.Policy(fairness=2.0))
    context = prompt(20_000, 1)
    sim.answer(context)
    running = sim.add(prompt(1000, 2), 50)
    sim.step()
    cold = sim.add(prompt(50_000, 3))
    sim.now += 0.01
    warm = sim.add(joined(context, prompt(50, 4)))
    sim.run()
    assert list(sim.ended)[1:] == [running, warm, cold]

    # A stream of cached prompts can't hold the cold one back for longer than the bound.
    sim = Sim(200, [FULL], max_requests=1, policy=qc.Policy(fairness=2.0))
    sim.answer(context)
    cold = sim.add(prompt(50_000, 3))
    blocker = sim.add(joined(context, prompt(50, 5)), 30)
    start = sim.now
    sent = 0
    while cold not in sim.token_times and sim.now - start < 20:
        if len(sim.scheduler.stats()) and sim.scheduler.stats()["requests_waiting"] < 3:
            sim.add(joined(context, prompt(50, 100 + sent)), 30)
            sent += 1
        sim.step()
    assert blocker in sim.ended
    assert sim.token_times[cold][0] - start < 2.0 + 50_000 / 25_600 * 1.3 + 0.5


def test_priority_goes_first() -> None:
    """Higher priority is admitted first and retracted last."""
    sim = Sim(200, [FULL], max_requests=1)
    sim.add(prompt(500, 1), 20)
    sim.step()
    low = sim.add(prompt(500, 2))
    high = sim.add(prompt(9000, 3), priority=1)
    sim.run()
    assert list(sim.ended)[1:] == [high, low]


def test_pool_runs_short_under_load() -> None:
    """Evict, then wait or retract: everything ends well, nothing is retracted over and over."""
    sim = Sim(14, [FULL])
    numbers = [sim.add(prompt(2500 + 61 * i, i), 1200) for i in range(24)]
    sim.run()
    assert all(sim.ended[number] == qc.LENGTH for number in numbers)
    stats = sim.scheduler.stats()
    assert stats["retractions"] <= 3 * len(numbers)
    assert stats["computed_tokens"] < 1.5 * (stats["prompt_tokens"] + stats["generated_tokens"])


def test_deadline() -> None:
    """A request that waits or runs past its deadline ends as timed out, with everything given back."""
    sim = Sim(20, [FULL], max_requests=1)
    running = sim.add(prompt(500, 1), 100_00, deadline=0.5)
    waiting = sim.add(prompt(500, 2), 10, deadline=0.4)
    last = sim.add(prompt(500, 3), 10)
    sim.run()
    assert (sim.ended[running], sim.ended[waiting], sim.ended[last]) == (qc.TIMEOUT, qc.TIMEOUT, qc.LENGTH)
    sim.scheduler.reset_prefix_cache()
    assert sim.scheduler.stats()["slabs_free"] == 20


def test_tenants_never_share() -> None:
    """Salt, adapter and content keep equal tokens apart."""
    sim = Sim(40, [FULL])
    tokens = prompt(1000, 1)
    sim.answer(tokens, cache_salt="tenant a")
    assert sim.scheduler.match(tokens) == 0
    assert sim.scheduler.match(tokens, cache_salt="tenant b") == 0
    assert sim.scheduler.match(tokens, cache_salt="tenant a", adapter="lora") == 0
    assert sim.scheduler.match(tokens, cache_salt="tenant a") == 15 * UNIT
    # An image stands behind tokens 300 to 400: what is before it is shared, what is after it isn't.
    assert sim.answer(tokens, cache_salt="tenant a", content=[(300, 0xFEED)]) == 300 // UNIT * UNIT


def test_retraction_of_a_prefill() -> None:
    """A prefill gives way to older decodes and returns later, its finished blocks still cached."""
    sim = Sim(9, [FULL], policy=qc.Policy(max_gap_factor=1.2))
    old = [sim.add(prompt(2000, i), 4000) for i in range(3)]
    for _ in range(60):
        sim.step()
    young = sim.add(prompt(12_000, 9), 4)
    sim.run()
    assert all(sim.ended[number] == qc.LENGTH for number in [*old, young])


def test_an_id_that_is_used_again_waits_for_its_own_copies() -> None:
    """Its first user is cancelled while its prefix comes back from the host; the second shares the copies."""
    sim = Sim(
        20,
        [qc.GroupConfig("full", 1)],
        tiers=[qc.TierConfig("host", [100])],
        policy=qc.Policy(demote_below=1.0),
    )
    tokens = prompt(8 * UNIT + 5, 1)
    for first in (tokens, prompt(18 * UNIT, 2)):
        sim.answer(first, 2)
        for _ in range(40):
            sim.step()  # copies go down, and the first prompt's blocks are evicted
    scheduler = sim.scheduler
    for again in (False, True):
        scheduler.add(qc.Request(77, tokens, max_tokens=2))
        plan = scheduler.plan(sim.now)
        assert plan is not None
        assert not plan.num_rows
        if not again:
            copies = plan.transfers_before.ids.tolist()
            scheduler.cancel(77)
    scheduler.transfers_done(copies[:-1])
    assert scheduler.plan(sim.now) is None
    scheduler.transfers_done(copies[-1:])
    plan = scheduler.plan(sim.now)
    assert plan is not None
    assert plan.num_rows == 1
