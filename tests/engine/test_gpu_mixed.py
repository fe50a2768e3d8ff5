"""On a GPU: recorded steps of decode rows beside a piece of a prompt change no token whose logit stands clear
of the others, and nothing in the cache but what they have to write.
"""

import numpy as np
import pytest
import torch
from driving import Checkpoint, Driver, random_prompts
from test_gpu import assert_same
from twin import GARBAGE, Twin

from quickturn.execution.mixed import mixed_sizes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DENSE = ["qwen3", "qwen2-window", "gemma3", "qwen3.5"]
ROUND = {"qwen3": 0.4, "qwen2-window": 0.4, "gemma3": 0.8}
"""How far bfloat16 moves log-probabilities of these tiny models from float32, at most in 300 prompts. Those
of qwen3.5 it moves by 2, since what a delta rule writes depends on all that it wrote before: there most
answers have to be equal.
"""
MIXTURES = ["qwen3.5-moe", "gpt-oss"]
"""Where two experts are level, another rounding takes the other one, and all that follows is another text."""
TOLERANCE = 0.05
"""Of float32 that matrix units may have rounded. A write to a wrong place is off by the garbage there."""


def arrivals(driver: Driver, rng: np.random.Generator, prompts: list[list[int]], counts: list[int]) -> None:
    """Requests that come while others are being answered."""
    driver.add(prompts[0], max_tokens=counts[0])
    for _ in range(8):
        driver.step()
    for prompt, count in zip(prompts[1:], counts[1:], strict=True):
        driver.add(prompt, max_tokens=count)
        for _ in range(int(rng.integers(0, 5))):
            driver.step()
    driver.drain()


def answered(
    checkpoint: Checkpoint, rng: np.random.Generator, dtype: str, overlap: bool
) -> list[tuple[list[int], list[int], list[int]]]:
    """Of each request its prompt, its answer among others, and the one it gets alone, kernel by kernel."""
    prompts = random_prompts(rng, [20, 40, *rng.integers(1, 220, 10).tolist()])
    counts = [60, *rng.integers(5, 25, 11).tolist()]
    options: dict[str, object] = {"dtype": dtype, "max_step_tokens": 512, "memory": 32 << 20}
    alone = checkpoint.driver(graphs=False, overlap=False, **options)
    expected = [alone.run(prompt, max_tokens=n).tokens for prompt, n in zip(prompts, counts, strict=True)]
    driver = checkpoint.driver(overlap=overlap, **options)
    arrivals(driver, rng, prompts, counts)
    assert driver.core.stats().values["steps_mixed_graph"] > 0
    got = [driver.answers[id].tokens for id in sorted(driver.answers)]
    return list(zip(prompts, got, expected, strict=True))


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_graphs_change_no_token(
    checkpoint: Checkpoint, rng: np.random.Generator, family: str, dtype: str, overlap: bool
) -> None:
    found = answered(checkpoint, rng, dtype, overlap)
    if dtype == "bfloat16" and family not in ROUND:
        assert sum(got == expected for _, got, expected in found) > len(found) / 2
        return
    level = ROUND[family] if dtype == "bfloat16" else None
    for prompt, got, expected in found:
        assert_same(checkpoint, dtype, prompt, got, expected, f"{len(prompt)} tokens", level)


@pytest.mark.parametrize("family", MIXTURES)
def test_mixed_graphs_of_mixtures(checkpoint: Checkpoint, rng: np.random.Generator) -> None:
    same = [got == expected for _, got, expected in answered(checkpoint, rng, "float32", True)]
    assert sum(same) >= len(same) - 2


@pytest.mark.parametrize("family", DENSE)
def test_mixed_graphs_write_where_they_should(checkpoint: Checkpoint, rng: np.random.Generator) -> None:
    options = {"max_step_tokens": 512, "memory": 32 << 20}
    driver = checkpoint.driver(overlap=False, **options)
    Twin(driver, checkpoint.driver(graphs=False, overlap=False, **options), rng, tolerance=TOLERANCE)
    prompts = random_prompts(rng, [20, 40, *rng.integers(1, 220, 14).tolist()])
    arrivals(driver, rng, prompts, [60, *rng.integers(5, 25, 15).tolist()])
    stats = driver.core.stats().values
    assert stats["steps_mixed_graph"] > 0
    assert bool((driver.core._runner.arena._bytes.view(torch.float32) == GARBAGE).any())


@pytest.mark.parametrize("family", ["qwen3"])
def test_all_are_recorded(checkpoint: Checkpoint) -> None:
    recorded = checkpoint.driver(max_requests=64, max_step_tokens=512).core._runner._graphs
    assert recorded is not None
    assert set(recorded._mixed) == set(mixed_sizes(64, 512))
