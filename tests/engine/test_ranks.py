"""Two ranks in lockstep, offline: they say what one rank says, whatever happens to requests."""

from collections.abc import Iterator

import numpy as np
import pytest
from driving import Checkpoint, assert_all_greedy
from ranks import BROKEN, alive, arrive, broken_checkpoint, check, config, driver_of, prompts_of, ranks_of

from quickturn.engine.leader import Leader
from quickturn.engine.messages import CancelRequest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return broken_checkpoint(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def two(checkpoint: Checkpoint) -> Iterator[Leader]:
    """Two ranks that share every layer and plan a step ahead, over a cache that is soon full."""
    leader = Leader(config(checkpoint, tp=2, overlap=True, max_requests=24, max_step_tokens=512))
    yield leader
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


def test_random_arrivals(two: Leader, checkpoint: Checkpoint, rng: np.random.Generator) -> None:
    driver = driver_of(two)
    prompts = prompts_of(rng, rng.integers(1, 60, 24).tolist())
    for id, prompt, seed in arrive(driver, rng, prompts, 3):
        answer = driver.answers[id]
        assert answer.finish in ("length", "error"), answer
        check(checkpoint, prompt, answer.tokens, seed)


def test_prefixes_are_reused_and_requests_retracted(
    two: Leader, checkpoint: Checkpoint, rng: np.random.Generator
) -> None:
    driver = driver_of(two)
    (start,) = prompts_of(rng, [80])
    assert driver.run(start, max_tokens=1).finish == "length"
    again = driver.run([*start, 5, 6, 9], max_tokens=8)
    assert again.cached_tokens == 80
    check(checkpoint, [*start, 5, 6, 9], again.tokens, None)
    # All of them start in one step, and the cache holds none but their first halves.
    capacity = two.ready().cache_tokens
    assert 24 * 24 < capacity < 24 * 140, capacity
    prompts = prompts_of(rng, [20] * 24)
    ids = [driver.add(prompt, max_tokens=180) for prompt in prompts]
    driver.drain()
    assert two.stats().values["retractions"] > 0
    for id in ids:
        assert driver.answers[id].finish == "length"
    assert_all_greedy(checkpoint.reference, prompts, [driver.answers[id].tokens for id in ids], 180)


def test_one_breaks_and_one_goes_away(two: Leader, checkpoint: Checkpoint, rng: np.random.Generator) -> None:
    driver = driver_of(two)
    before = two.stats().values
    prompts = prompts_of(rng, [30, 12, 41])
    good = driver.add(prompts[0], max_tokens=30)
    bad = driver.add([*prompts[1], BROKEN, 9], max_tokens=30)
    gone = driver.add(prompts[2], max_tokens=60)
    for _ in range(12):
        driver.step()
    two.cancel(CancelRequest(gone))
    two.cancel(CancelRequest(10**9))
    driver.drain()
    assert "not a finite number" in driver.answers[bad].error
    assert driver.answers[gone].finish == "cancelled"
    check(checkpoint, prompts[2], driver.answers[gone].tokens, None)
    check(checkpoint, prompts[0], driver.answers[good].tokens, None)
    after = two.stats().values
    assert after["requests_failed"] == before["requests_failed"] + 1
    assert after["requests_running"] == 0


def test_refused_by_all_ranks_alike(two: Leader) -> None:
    driver = driver_of(two)
    for prompt, options, why in (
        ([3] * 300, {}, "context"),
        ([10**6], {}, "vocabulary"),
    ):
        answer = driver.run(prompt, max_tokens=4, **options)
        assert answer.finish == "error"
        assert why in answer.error
    assert driver.run([3, 4, 5], max_tokens=4, prompt_logprobs=2).finish == "length"


def test_what_steps_take_is_learned_from_the_first_rank(two: Leader, rng: np.random.Generator) -> None:
    """How much of a prompt a step takes follows from it: on every rank the same, or their plans would
    differ.
    """
    driver = driver_of(two)
    driver.run(*prompts_of(rng, [20]), max_tokens=10)
    assert two.stats().values["step_us_measured"] > 0
