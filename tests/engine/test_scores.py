"""Prompts with a score for every token: the log-probabilities are transformers', however the prompt was cut
into steps, whatever was cached, and whoever runs beside.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from driving import Checkpoints, Driver, assert_greedy, random_prompts
from numpy.typing import NDArray
from routers import decided_logits
from transformers import PreTrainedModel

from quickturn.execution import scoring

FAMILIES = ["llama", "gemma3", "gpt-oss", "qwen3-next", "qwen3.5"]
CLOSE = 1e-3
"""Log-probabilities in float32 whose logits were added up in another order differ by less; a recurrence
passes rounding on.
"""
CLOSE_RECURRENT = 2e-2


@dataclass
class Scores:
    """All that was said of one prompt, joined."""

    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    top_tokens: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    messages: int = 0


class Listener:
    """Steps a driver and joins what it says of prompts."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.scores: dict[int, Scores] = {}

    def step(self) -> None:
        answering = {id for id, answer in self.driver.answers.items() if answer.tokens or answer.finish}
        self.driver.step()
        for news in self.driver.core.news():
            assert news.id not in answering, "the answer began before its prompt was scored"
            scores = self.scores.setdefault(news.id, Scores())
            count = len(news.logprobs) // 4
            assert news.start == len(scores.logprobs) + 1, "each token once, in order"
            scores.logprobs += np.frombuffer(news.logprobs, "<f4").tolist()
            scores.ranks += np.frombuffer(news.ranks, "<i4").tolist()
            scores.top_tokens += np.frombuffer(news.top_tokens, "<i4").reshape(count, -1).tolist()
            scores.top_logprobs += np.frombuffer(news.top_logprobs, "<f4").reshape(count, -1).tolist()
            scores.messages += 1

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.driver.core.has_work():
                return
            self.step()
        raise AssertionError("the engine never finished")

    def run(self, prompt: list[int], **options: object) -> Scores:
        id = self.driver.add(prompt, **options)  # type: ignore[arg-type]
        self.drain()
        return self.scores[id]


def oracle(model: PreTrainedModel, prompt: list[int]) -> NDArray[np.float64]:
    """transformers' log-probabilities of every token behind every prefix: [tokens - 1, V]; of as many
    prefixes as they are certain for.
    """
    logits, decided = decided_logits(model, torch.tensor([prompt]))
    return logits[0, :-1][decided[0, :-1]].double().log_softmax(-1).numpy()  # type: ignore[no-any-return]


def assert_scores(model: PreTrainedModel, prompt: list[int], scores: Scores, top: int) -> None:
    """`scores` are those of `model`; of tokens as likely as each other any may stand at a place."""
    close = (
        CLOSE_RECURRENT if "linear_attention" in (getattr(model.config, "layer_types", None) or ()) else CLOSE
    )
    expected = oracle(model, prompt)
    assert len(scores.logprobs) == len(scores.ranks) == len(prompt) - 1
    tops = np.array(scores.top_logprobs).reshape(len(prompt) - 1, -1)
    assert tops.shape[1] == top
    sure = len(expected)
    tops, targets = tops[:sure], np.array(prompt[1:])[:sure]
    own = expected[np.arange(sure), targets]
    np.testing.assert_allclose(scores.logprobs[:sure], own, atol=close)
    certainly = (expected > own[:, None] + 2 * close).sum(1) + 1
    perhaps = (expected >= own[:, None] - 2 * close).sum(1)
    ranks = np.array(scores.ranks[:sure])
    assert np.all((certainly <= ranks) & (ranks <= perhaps))
    if top:
        np.testing.assert_allclose(tops, -np.sort(-expected)[:, :top], atol=close)
        named = np.take_along_axis(
            expected, np.array(scores.top_tokens[:sure], dtype=np.int64).reshape(sure, top), 1
        )
        np.testing.assert_allclose(named, tops, atol=close)
        assert all(len(set(row)) == top for row in scores.top_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_chunk_size(checkpoints: Checkpoints, rng: np.random.Generator, family: str) -> None:
    checkpoint = checkpoints(family)
    (prompt,) = random_prompts(rng, [29])
    for chunk in (1, 2, 3, 5, 8, 13, 28, 29, 64):
        listener = Listener(checkpoint.driver(max_step_tokens=chunk, max_requests=1))
        scores = listener.run(prompt, max_tokens=3, prompt_logprobs=chunk % 4)
        assert_scores(checkpoint.reference, prompt, scores, chunk % 4)
        assert_greedy(checkpoint.reference, prompt, listener.driver.answers[1].tokens, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_and_messages_are_bounded(
    checkpoints: Checkpoints, rng: np.random.Generator, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's logits come a few rows at a time, and what is said of them in small messages."""
    checkpoint = checkpoints(family)
    vocab = checkpoint.reference.config.get_text_config().vocab_size
    monkeypatch.setattr(scoring, "SLICE_BYTES", 4 * vocab * 7)
    monkeypatch.setattr("quickturn.engine.scores.MAX_PIECE", 5)
    seen: list[int] = []
    take = scoring.Scoring.take

    def watched(self: scoring.Scoring, logits: torch.Tensor) -> None:
        seen.append(len(logits))
        take(self, logits)

    monkeypatch.setattr(scoring.Scoring, "take", watched)
    (prompt,) = random_prompts(rng, [60])
    listener = Listener(checkpoint.driver())
    assert_scores(checkpoint.reference, prompt, listener.run(prompt, max_tokens=1, prompt_logprobs=2), 2)
    assert max(seen) == 7
    assert sum(seen) == 59
    assert listener.scores[1].messages >= 12


@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
@pytest.mark.parametrize("overlap", [False, True])
def test_beside_others_and_with_a_full_cache(
    checkpoints: Checkpoints, rng: np.random.Generator, family: str, overlap: bool
) -> None:
    """Cached blocks are not used, and serve others afterwards; nobody's tokens change."""
    checkpoint = checkpoints(family)
    listener = Listener(checkpoint.driver(overlap=overlap, max_step_tokens=24))
    driver = listener.driver
    prompts = random_prompts(rng, [45, 1, 2, 45, 7, 33, 60, 18, 45])
    prompts[3] = prompts[8] = prompts[0]
    ids = []
    for index, prompt in enumerate(prompts):
        top = index % 4 if index % 2 == 0 or index == 3 else None
        ids.append(driver.add(prompt, max_tokens=int(rng.integers(1, 12)), prompt_logprobs=top))
        for _ in range(int(rng.integers(0, 5))):
            listener.step()
    listener.drain()
    for index, (id, prompt) in enumerate(zip(ids, prompts, strict=True)):
        answer = driver.answers[id]
        assert_greedy(checkpoint.reference, prompt, answer.tokens, len(answer.tokens))
        if index % 2 == 0 or index == 3:
            assert answer.cached_tokens == 0
            assert_scores(checkpoint.reference, prompt, listener.scores.get(id, Scores()), index % 4)
        else:
            assert id not in listener.scores
    assert driver.run(prompts[0], max_tokens=1).cached_tokens == 44


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5-small"])
def test_retracted_in_the_middle(checkpoints: Checkpoints, rng: np.random.Generator, family: str) -> None:
    """A small pool and growing neighbours: a prompt gives way half-way, and each token is scored once."""
    checkpoint = checkpoints(family)
    ready = checkpoint.driver(memory=1 << 20).core.ready()
    capacity, longest = ready.cache_tokens, ready.max_context
    users = capacity // 100
    listener = Listener(
        checkpoint.driver(memory=1 << 20, max_requests=users + 2, max_step_tokens=users + 2, overlap=True)
    )
    driver = listener.driver
    answer = capacity // users
    neighbours = [
        driver.add(prompt, max_tokens=answer, priority=1) for prompt in random_prompts(rng, [2] * users)
    ]
    while not all(driver.answers[id].tokens for id in neighbours):
        listener.step()
    prompts = random_prompts(rng, [min(capacity // 3, longest - 2)] * 2)
    ids = [driver.add(prompt, max_tokens=2, prompt_logprobs=1) for prompt in prompts]
    while driver.core.stats().values["retractions"] == 0:
        assert not driver.answers[ids[0]].tokens, "it never gave way"
        listener.step()
    assert listener.scores[ids[0]].logprobs
    listener.drain()
    assert all(len(driver.answers[id].tokens) == answer for id in neighbours)
    for id, prompt in zip(ids, prompts, strict=True):
        assert_scores(checkpoint.reference, prompt, listener.scores[id], 1)
        assert_greedy(checkpoint.reference, prompt, driver.answers[id].tokens, 2)


def test_numbers_that_are_none(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    """A prompt whose logits are no numbers ends with an error, and its neighbour goes on."""
    listener = Listener(checkpoints("llama").driver(max_step_tokens=16))
    model = listener.driver.core._runner._model
    forward = model.forward_scored

    def broken(batch: object, slices: object, take: object) -> torch.Tensor:
        return forward(batch, slices, lambda logits: take(logits.fill_(float("nan"))))  # type: ignore[operator,arg-type]

    model.forward_scored = broken  # type: ignore[method-assign,assignment]
    good, bad = random_prompts(rng, [10, 50])
    first = listener.driver.add(good, max_tokens=20)
    listener.step()
    second = listener.driver.add(bad, max_tokens=4, prompt_logprobs=0)
    listener.drain()
    assert listener.driver.answers[first].finish == "length"
    assert listener.driver.answers[second].finish == "error"
    assert "finite" in listener.driver.answers[second].error
    assert not listener.scores
