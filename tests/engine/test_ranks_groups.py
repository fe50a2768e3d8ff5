"""Two ranks with requests of their own take their steps together, also when one of them has none."""

from collections.abc import Iterator

import numpy as np
import pytest
from driving import Checkpoint
from ranks import alive, arrive, broken_checkpoint, check, config, driver_of, prompts_of, ranks_of, sound_part

from quickturn.engine.leader import Leader


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return broken_checkpoint(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def groups(checkpoint: Checkpoint) -> Iterator[Leader]:
    """Two ranks with requests of their own, that share dense layers."""
    leader = Leader(config(checkpoint, dp=2, dense_tp=2))
    yield leader
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


def test_groups_have_requests_of_their_own(
    groups: Leader, checkpoint: Checkpoint, rng: np.random.Generator
) -> None:
    """Random arrivals with times of quiet: often one group has nothing to do, and helps with a row of
    padding.
    """
    driver = driver_of(groups)
    for most in (0, 2, 12):
        prompts = prompts_of(rng, rng.integers(1, 60, 12).tolist())
        for id, prompt, seed in arrive(driver, rng, prompts, most):
            assert driver.answers[id].finish in ("length", "error"), driver.answers[id]
            check(checkpoint, prompt, driver.answers[id].tokens, seed)
    own, both = groups._core.stats().values, groups.stats().values
    assert 0 < own["generated_tokens"] < both["generated_tokens"]
    assert both["requests_running"] == 0
    assert not groups.has_work()


@pytest.mark.parametrize("first", [0, 1])
def test_one_group_alone_is_helped_by_the_other(
    groups: Leader, checkpoint: Checkpoint, rng: np.random.Generator, first: int
) -> None:
    driver = driver_of(groups)
    prompts = prompts_of(rng, [45, 45])
    blocker = driver.add(prompts[0], max_tokens=1, session="a") if first else None
    id = driver.add(prompts[1], max_tokens=25, session="b")
    assert groups._router.of_request(id) == first
    driver.drain()
    check(checkpoint, prompts[1], driver.answers[id].tokens, None)
    assert blocker is None or driver.answers[blocker].finish == "length"


def test_conversations_stay_where_their_cache_is(groups: Leader, rng: np.random.Generator) -> None:
    driver = driver_of(groups)
    talks = prompts_of(rng, [40, 40])
    for turn in range(3):
        for talk in talks:
            answer = driver.run(talk, max_tokens=4)
            assert answer.cached_tokens >= (0 if turn == 0 else len(talk) // 4 * 4 - 12)
            talk += [*sound_part(answer.tokens)[:3], 3, 4, 5]
