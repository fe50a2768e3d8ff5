"""Two ranks in lockstep, offline: they say what one rank says, whatever happens to requests, and when one of
them ends, so does the other.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from driving import MAX_STEPS, Checkpoint, Driver, assert_drawn, assert_greedy, random_prompts
from tiny import random_checkpoint

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.crew import RankLost
from quickturn.engine.leader import Leader
from quickturn.engine.messages import CancelRequest
from quickturn.engine.ranked import RankedCore

BROKEN = 7
"""A token whose embedding is NaN; nothing makes it likely."""
SECONDS = 120.0
"""Longest wait for another rank."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """What engines load has the broken token, the reference that they are compared with hasn't."""
    reference = random_checkpoint("llama", {})
    path: Path = tmp_path_factory.mktemp("ranks")
    saved = {name: value.clone() for name, value in reference.state_dict().items()}
    saved["model.embed_tokens.weight"][BROKEN] = float("nan")
    reference.save_pretrained(path, state_dict=saved)
    return Checkpoint(path, reference, "cpu")


def config(checkpoint: Checkpoint, **options: object) -> EngineConfig:
    chosen: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "memory": 1 << 20,
        "block_tokens": 4,
        "max_requests": 8,
        "max_step_tokens": 32,
        "rank_timeout": SECONDS,
    } | options
    return EngineConfig(str(checkpoint.path), **chosen)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two(checkpoint: Checkpoint) -> Iterator[Leader]:
    """Two ranks that share every layer and plan a step ahead, over a cache that is soon full."""
    leader = Leader(config(checkpoint, tp=2, overlap=True, max_requests=16))
    yield leader
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


@pytest.fixture(scope="module")
def groups(checkpoint: Checkpoint) -> Iterator[Leader]:
    """Two ranks with requests of their own, that share dense layers."""
    leader = Leader(config(checkpoint, dp=2, dense_tp=2))
    yield leader
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


def driver_of(leader: Leader) -> Driver:
    return Driver(leader)  # type: ignore[arg-type]


def ranks_of(leader: Leader) -> list[int]:
    return [member.process.pid for member in leader._crew.members if member.process is not None]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def prompts_of(rng: np.random.Generator, lengths: list[int]) -> list[list[int]]:
    """Random prompts without the broken token."""
    return [[token if token != BROKEN else 8 for token in one] for one in random_prompts(rng, lengths)]


def sound_part(tokens: list[int]) -> list[int]:
    """Up to the broken token, which may be drawn, too."""
    return tokens[: tokens.index(BROKEN) + 1] if BROKEN in tokens else tokens


def check(checkpoint: Checkpoint, prompt: list[int], tokens: list[int], seed: int | None) -> None:
    """Each token is the likeliest, or the one that the seed draws."""
    tokens = sound_part(tokens)
    if seed is None:
        assert_greedy(checkpoint.reference, prompt, tokens, len(tokens))
    else:
        assert_drawn(checkpoint.reference, prompt, tokens, seed=seed, temperature=0.8)


def arrive(
    driver: Driver, rng: np.random.Generator, prompts: list[list[int]], most: int
) -> list[tuple[int, list[int], int | None]]:
    """The prompts one after the other, some with a seed, with up to `most` steps between them; all run to
    their end. Returns ids, prompts and seeds.
    """
    added = []
    for index, prompt in enumerate(prompts):
        seed = index if index % 3 == 0 else None
        options = {} if seed is None else {"temperature": 0.8, "seed": seed}
        id = driver.add(prompt, max_tokens=int(rng.integers(1, 20)), **options)
        added.append((id, prompt, seed))
        for _ in range(int(rng.integers(0, most + 1))):
            if driver.core.has_work():
                driver.step()
    driver.drain()
    return added


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
    prompts = prompts_of(rng, [70] * 16)
    ids = [driver.add(prompt, max_tokens=170) for prompt in prompts]
    driver.drain()
    for id, prompt in zip(ids, prompts, strict=True):
        assert driver.answers[id].finish in ("length", "error")
        check(checkpoint, prompt, driver.answers[id].tokens, None)
    assert two.stats().values["retractions"] > 0


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
        ([3, 4], {"prompt_logprobs": 0}, "several ranks"),
    ):
        answer = driver.run(prompt, max_tokens=4, **options)
        assert answer.finish == "error"
        assert why in answer.error
    assert driver.run([3, 4, 5], max_tokens=4).finish == "length"


def test_what_steps_take_is_learned_from_the_first_rank(two: Leader, rng: np.random.Generator) -> None:
    """How much of a prompt a step takes follows from it: on every rank the same, or their plans would
    differ.
    """
    driver = driver_of(two)
    driver.run(*prompts_of(rng, [20]), max_tokens=10)
    assert two.stats().values["step_us_measured"] > 0


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


def test_plans_that_differ_end_all(
    checkpoint: Checkpoint, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank believes to have drawn something else than it has."""
    leader = Leader(config(checkpoint, tp=2))
    driver = driver_of(leader)
    for prompt in prompts_of(rng, [20, 30]):
        driver.add(prompt, max_tokens=100)
    for _ in range(5):
        driver.step()
    leader._core.digest ^= 1
    with pytest.raises(RankLost, match="rank 1 planned another step"):
        step_until_lost(driver)
    leader.close()
    assert not any(map(alive, ranks_of(leader)))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_rank_ends_the_others(checkpoint: Checkpoint, rng: np.random.Generator, how: str) -> None:
    """SIGSTOP stands for a process that hangs."""
    leader = Leader(config(checkpoint, tp=2))
    driver = driver_of(leader)
    for prompt in prompts_of(rng, [20, 30]):
        driver.add(prompt, max_tokens=200)
    for _ in range(5):
        driver.step()
    if how == "killed":
        os.kill(ranks_of(leader)[0], signal.SIGKILL)
        expected = r"rank 1 \(process \d+\) ended unexpectedly \(killed by SIGKILL"
    else:
        leader._crew._timeout = 1.0
        os.kill(ranks_of(leader)[0], signal.SIGSTOP)
        expected = r"the ranks hang: the first one has not got on with 'a step' for 1 s"
    with pytest.raises(RankLost, match=expected):
        step_until_lost(driver)
    leader.close()
    assert not any(map(alive, ranks_of(leader)))
    with pytest.raises(RankLost, match=expected):
        leader.step()


def step_until_lost(driver: Driver) -> None:
    for _ in range(MAX_STEPS):
        driver.step()


def test_a_failure_at_the_start_is_that_ranks_own_words(checkpoint: Checkpoint) -> None:
    """No process is left, and this one can start ranks again."""
    with pytest.raises((RankLost, ValueError), match=r"3 doesn't divide|heads"):
        Leader(config(checkpoint, tp=3))
    with pytest.raises(ValueError, match="no GPU"):
        Leader(config(checkpoint, tp=2, device="cuda"))


def test_ranked_core_refuses_a_foreign_digest(checkpoint: Checkpoint) -> None:
    from quickturn.engine.lockstep import Batch, Go
    from quickturn.engine.ranked import RanksDiverged
    from quickturn.engine.seat import Seat
    from quickturn.parallel.mesh import Mesh

    core = EngineCore(config(checkpoint))
    ranked = RankedCore(core, Seat(Mesh()))
    assert ranked.plan(Batch(0.0)).digest == 0
    with pytest.raises(RanksDiverged, match="planned another step"):
        ranked.run(Go([1]))
