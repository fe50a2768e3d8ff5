"""Masks that depend on every token before hold at each step, whatever runs ahead; nobody else notices."""

import itertools
import time

import numpy as np
import pytest
import torch
from driving import Checkpoint, Checkpoints, Driver, assert_same_or_level, random_prompts


class Obedient:
    """A row that allows one token only, which follows from all tokens before."""

    def __init__(self, vocab_size: int, free: int = 0) -> None:
        """The first `free` tokens may be any."""
        self.tokens: list[int] = []
        self._size = vocab_size
        self._free = free

    def wanted(self) -> int:
        total = sum((place + 1) * token for place, token in enumerate(self.tokens))
        return (total * 31 + len(self.tokens) * 7) % self._size

    def accept(self, token: int) -> bool:
        good = len(self.tokens) < self._free or token == self.wanted()
        self.tokens.append(token)
        return good

    def fill(self, bitmask: torch.Tensor, row: int) -> bool:
        if len(self.tokens) < self._free:
            return False
        token = self.wanted()
        bitmask[row] = 0
        bitmask[row, token // 32] = int(np.uint32(1 << (token % 32)).astype(np.int32))
        return True


def obey(driver: Driver, id: int, free: int = 0) -> Obedient:
    row = Obedient(driver.core.ready().vocab_size, free)
    driver.core._live[id].row = row  # type: ignore[assignment]
    driver.core._constrained += 1
    return row


@pytest.fixture
def checkpoint(checkpoints: Checkpoints) -> Checkpoint:
    return checkpoints("qwen3")


@pytest.mark.parametrize(("graphs", "overlap"), list(itertools.product((False, True), (False, True))))
def test_masks_hold_and_neighbours_do_not_notice(
    checkpoint: Checkpoint, rng: np.random.Generator, graphs: bool, overlap: bool
) -> None:
    prompts = random_prompts(rng, [9, 40, 3, 17])
    counts = [30, 25, 40, 35]
    free = checkpoint.driver(graphs=graphs, overlap=overlap)
    for prompt, count in zip(prompts, counts, strict=True):
        free.add(prompt, max_tokens=count)
    free.drain()
    driver = checkpoint.driver(graphs=graphs, overlap=overlap)
    ids = [
        driver.add(prompt, max_tokens=count, temperature=1.0 if place == 1 else 0.0, seed=5)
        for place, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    rows = {ids[1]: obey(driver, ids[1]), ids[2]: obey(driver, ids[2], free=10)}
    driver.drain()
    for id, row in rows.items():
        answer = driver.answers[id]
        assert (answer.finish, answer.error) == ("length", "")
        assert answer.tokens == row.tokens
        again = Obedient(driver.core.ready().vocab_size, row._free)
        assert all(again.accept(token) for token in answer.tokens)
    for place, count in ((0, 30), (2, 10), (3, 35)):
        alone, beside = free.answers[place + 1].tokens[:count], driver.answers[ids[place]].tokens[:count]
        assert_same_or_level(checkpoint.reference, prompts[place], alone, beside)
    assert driver.core._constrained == 0


def test_a_grammar_that_keeps_all_waiting_ends(checkpoint: Checkpoint, rng: np.random.Generator) -> None:
    driver = checkpoint.driver()
    one, other = (driver.add(prompt, max_tokens=12) for prompt in random_prompts(rng, [5, 6]))
    row = obey(driver, one)
    fill = row.fill

    def slow(bitmask: torch.Tensor, place: int) -> bool:
        end = time.perf_counter() + 0.25
        while time.perf_counter() < end:
            pass
        return fill(bitmask, place)

    row.fill = slow  # type: ignore[method-assign]
    driver.drain()
    assert driver.answers[one].finish == "error"
    assert "less ambiguous" in driver.answers[one].error
    assert len(driver.answers[one].tokens) <= 4
    assert len(driver.answers[other].tokens) == 12


def test_a_token_against_the_grammar_ends_its_request_alone(
    checkpoint: Checkpoint, rng: np.random.Generator
) -> None:
    driver = checkpoint.driver()
    one, other = (driver.add(prompt, max_tokens=12) for prompt in random_prompts(rng, [5, 6]))
    row = obey(driver, one)
    row.fill = lambda bitmask, place: False  # type: ignore[method-assign]
    driver.drain()
    assert driver.answers[one].finish == "error"
    assert "grammar doesn't allow" in driver.answers[one].error
    assert len(driver.answers[other].tokens) == 12
