"""Steps as graphs replay them, run eagerly: padding, buckets and what lies behind the end of a prompt."""

import gc
from typing import Any

import numpy as np
import pytest
from driving import Checkpoints, Driver, assert_greedy, random_prompts
from recorded import Eager, record_eagerly

from quickturn.execution import graphs

SIZES = (4, 8, 24)
FAMILIES = ["qwen3", "qwen2-window", "gemma3", "qwen3-next", "qwen3.5-moe", "gpt-oss"]


def driver_with_graphs(
    checkpoints: Checkpoints, family: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Driver, dict[int, Eager]]:
    record_eagerly(monkeypatch)
    monkeypatch.setattr(graphs, "PROMPT_TOKENS", SIZES)
    driver = checkpoints(family).driver(graphs=False, memory=32 << 20)
    runner = driver.core._runner
    runner.capture_graphs(64, lambda done, total: None)
    assert runner._graphs is not None
    steps: dict[int, Eager] = runner._graphs._prompts  # type: ignore[assignment]
    return driver, steps


@pytest.mark.parametrize("family", FAMILIES)
def test_the_end_of_a_prompt_is_padded_and_nothing_else_changes(
    checkpoints: Checkpoints, rng: np.random.Generator, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, steps = driver_with_graphs(checkpoints, family, monkeypatch)
    model = checkpoints(family).reference
    before = sum(step.replays for step in steps.values())
    (base,) = random_prompts(rng, [40])
    for tail in random_prompts(rng, [1, 3, 4, 5, 23, 24]):
        prompt = [*base, *tail]
        assert_greedy(model, prompt, driver.run(prompt, max_tokens=4).tokens, 4)
    assert sum(step.replays for step in steps.values()) >= before + 5


def test_prompts_beside_each_other_are_not_recorded_steps(
    checkpoints: Checkpoints, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, steps = driver_with_graphs(checkpoints, "qwen3", monkeypatch)
    prompts = random_prompts(rng, [7, 9, 3])
    ids = [driver.add(prompt, max_tokens=5) for prompt in prompts]
    driver.drain()
    for id, prompt in zip(ids, prompts, strict=True):
        assert_greedy(checkpoints("qwen3").reference, prompt, driver.answers[id].tokens, 5)
    assert all(step.replays == 1 for step in steps.values())


def test_no_garbage_is_collected_while_steps_are_recorded(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs of an engine that is gone may be in a cycle, and destroying one breaks off a recording: what
    is left over goes first.
    """
    record_eagerly(monkeypatch)
    runner = checkpoints("qwen3").driver(graphs=False).core._runner
    record, collect = graphs.record, gc.collect
    happened: list[str] = []

    def recorded(*arguments: Any) -> object:
        assert not gc.isenabled()
        happened.append("recorded")
        return record(*arguments)

    def collected(*arguments: Any) -> int:
        happened.append("collected")
        return collect(*arguments)

    monkeypatch.setattr(graphs, "record", recorded)
    monkeypatch.setattr(gc, "collect", collected)
    runner.capture_graphs(64, lambda done, total: None)
    assert happened[:2] == ["collected", "recorded"]
    assert set(happened[1:]) == {"recorded"}
    assert gc.isenabled()
