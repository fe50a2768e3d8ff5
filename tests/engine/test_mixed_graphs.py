"""Steps of decode rows beside a piece of one prompt, as graphs replay them, run eagerly: whatever arrives,
they leave the tokens and the cache of steps that aren't recorded.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from driving import Checkpoints, Driver, assert_greedy, random_prompts
from recorded import Eager, record_eagerly
from twin import Rounded, Twin, row_by_row

from quickturn.engine import start
from quickturn.execution import graphs
from quickturn.execution.batch import StepRows
from quickturn.execution.mixed import DECODE_ROWS, LEAST_PROMPT, MixedSize, mixed_size_for, mixed_sizes
from quickturn.execution.runner import PendingStep

FAMILIES = ["qwen3", "qwen2-window", "gemma3", "qwen3-next", "qwen3.5-moe", "gpt-oss"]


def twins(
    checkpoints: Checkpoints,
    family: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    masked: float = 0.0,
    **options: object,
) -> Driver:
    """An engine on recorded steps, every step of which is compared."""
    checkpoint = checkpoints(family)
    if checkpoint.device != "cpu":
        pytest.skip("bits of a product depend on the number of its rows")
    record_eagerly(monkeypatch)
    row_by_row(monkeypatch)
    driver = checkpoint.driver(graphs=False, **options)
    assert driver.core._runner.capture_graphs(64, lambda done, total: None) == 0
    Twin(driver, checkpoint.driver(graphs=False, **options), rng, masked)
    return driver


def replays(driver: Driver) -> dict[MixedSize, int]:
    """How often each mixed step was replayed."""
    recorded = driver.core._runner._graphs
    assert recorded is not None
    steps: dict[MixedSize, Eager] = recorded._mixed  # type: ignore[assignment]
    return {size: step.replays - 1 for size, step in steps.items()}


def arrivals(
    driver: Driver,
    rng: np.random.Generator,
    lengths: list[int],
    sampling: Callable[[], dict[str, object]] = dict,
) -> None:
    """Requests that come while others are being answered. The second comes beside one that decodes."""
    first, *prompts = random_prompts(rng, lengths)
    with Rounded():
        driver.add(first, max_tokens=60, **sampling())  # type: ignore[arg-type]
        for _ in range(8):
            driver.step()
        for prompt in prompts:
            driver.add(prompt, max_tokens=int(rng.integers(1, 25)), **sampling())  # type: ignore[arg-type]
            for _ in range(int(rng.integers(0, 5))):
                driver.step()
        driver.drain()
    assert {answer.finish for answer in driver.answers.values()} == {"length"}
    stats = driver.core.stats().values
    assert stats["steps_mixed_graph"] == sum(replays(driver).values()) > 0


@pytest.mark.parametrize(("family", "overlap"), [(family, i % 2 == 0) for i, family in enumerate(FAMILIES)])
def test_arrivals_beside_decoding_rows(
    checkpoints: Checkpoints,
    rng: np.random.Generator,
    family: str,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = twins(checkpoints, family, rng, monkeypatch, overlap=overlap)
    arrivals(driver, rng, [20, 40, *rng.integers(1, 90, 10).tolist()])


@pytest.mark.parametrize(("family", "requests"), [("qwen3", 16), ("qwen3.5", 48)])
def test_rows_that_give_way_and_prefixes_that_are_met_again(
    checkpoints: Checkpoints,
    rng: np.random.Generator,
    family: str,
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = twins(checkpoints, family, rng, monkeypatch, memory=1 << 20, max_requests=requests)
    (base,) = random_prompts(rng, [24])
    with Rounded():
        for tail in random_prompts(rng, rng.integers(40, 50, requests).tolist()):
            driver.add([*base, *tail], max_tokens=200)
            driver.step()
        for _ in range(400):
            driver.step()
            if driver.core.stats().values["retractions"] >= 4:
                break
        for _ in range(40):
            driver.step()
    stats = driver.core.stats().values
    assert stats["retractions"] >= 4
    assert stats["cached_tokens"] > 0
    assert stats["steps_mixed_graph"] == sum(replays(driver).values()) > 0


def test_sampled_rows(
    checkpoints: Checkpoints, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws, penalties, log-probabilities and masks, beside rows that ask for nothing."""
    driver = twins(checkpoints, "qwen3", rng, monkeypatch, masked=0.5)

    def sampling() -> dict[str, object]:
        seed = int(rng.integers(1, 1000))
        asked: list[dict[str, object]] = [
            {},
            {"temperature": 0.8, "seed": seed},
            {"temperature": 1.2, "top_k": 5, "seed": seed, "logprobs": 2},
            {"repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"logprobs": 0, "logit_bias": {7: 5.0}},
        ]
        return asked[int(rng.integers(len(asked)))]

    arrivals(driver, rng, [20, 40, *rng.integers(1, 90, 10).tolist()], sampling)


def test_an_engine_cuts_prompts_to_recorded_steps(
    checkpoints: Checkpoints, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_eagerly(monkeypatch)
    checkpoint = checkpoints("qwen3")
    monkeypatch.setattr(start, "GRAPH_DEVICES", (checkpoint.device,))
    driver = checkpoint.driver(overlap=False)
    runner = driver.core._runner
    assert set(runner.recorded_mixed()) == {(size.rows, size.tokens) for size in mixed_sizes(8, 64)}
    reader, newcomer = random_prompts(rng, [30, 200])
    answers = [driver.add(reader, max_tokens=200)]
    pieces: list[list[int]] = []
    launch = runner.launch

    def watched(rows: StepRows, *rest: Any) -> PendingStep:
        pieces.append(rows.query_lens[rows.num_decode :].tolist() if rows.num_decode else [])
        pending = launch(rows, *rest)
        result = pending.wait()
        # Such a machine that every recorded step fits, beside decode steps that all take the same.
        monkeypatch.setattr(
            pending, "wait", lambda: replace(result, seconds=4e-3 + 1e-5 * rows.query_lens.sum())
        )
        return pending

    monkeypatch.setattr(runner, "launch", watched)
    while len(driver.answers[answers[0]].tokens) < 20:
        driver.step()
    answers.append(driver.add(newcomer, max_tokens=4))
    while not driver.answers[answers[1]].finish:
        driver.step()
    assert_greedy(checkpoint.reference, newcomer, driver.answers[answers[1]].tokens, 4)
    mixed = [lens[0] for lens in pieces if lens]
    assert set(mixed[:-1]) <= {15, 31, 47, 63}
    assert driver.core.stats().values["steps_mixed_graph"] == len(mixed)


def test_what_is_recorded() -> None:
    sizes = mixed_sizes(256, 2048)
    assert len(set(sizes)) == len(sizes) == 57
    assert all(size.rows + size.prompt == size.tokens for size in sizes)
    assert min(size.prompt for size in sizes) == LEAST_PROMPT
    assert {size.rows for size in sizes} == set(DECODE_ROWS)
    assert max(size.tokens for size in mixed_sizes(256, 100)) == 96
    assert {size.rows for size in mixed_sizes(4, 2048)} == {1, 2, 3}
    assert mixed_sizes(1, 2048) == []


def test_the_smallest_that_holds_a_step() -> None:
    sizes = mixed_sizes(256, 2048)
    assert mixed_size_for(sizes, 1, 15) == MixedSize(16, 1)
    assert mixed_size_for(sizes, 1, 16) == MixedSize(32, 1)
    assert mixed_size_for(sizes, 3, 1) == MixedSize(16, 4)
    assert mixed_size_for(sizes, 17, 480) == MixedSize(512, 32)
    assert mixed_size_for(sizes, 17, 481) is None
    assert mixed_size_for(sizes, 33, 1) is None
    assert mixed_size_for([], 1, 1) is None


def test_recording_ends_when_time_is_over_on_any_rank(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_eagerly(monkeypatch)
    checkpoint = checkpoints("qwen3")
    runner = checkpoint.driver(graphs=False).core._runner
    whole = len(mixed_sizes(8, 64))
    asked: list[int] = []
    reports: list[tuple[int, int]] = []

    def agree(mine: int) -> int:
        asked.append(mine)
        return min(mine, int(len(asked) <= 3))

    assert runner.capture_graphs(64, lambda *report: reports.append(report), agree=agree) == whole - 3
    assert asked == [1] * 4
    assert reports[-1][0] == reports[-1][1]
    monkeypatch.setattr(graphs, "MIXED_SECONDS", 0.0)
    assert runner.capture_graphs(64, lambda *report: None) == whole
