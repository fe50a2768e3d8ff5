"""The engine's greedy tokens equal transformers' on the same float32 weights, whatever the schedule."""

import numpy as np
import pytest
import torch
from driving import TIE, Checkpoints, assert_greedy, assert_same_or_level, random_prompts

FAMILIES = ["llama", "qwen2", "qwen3"]
WINDOWED = ["qwen2-window", "qwen3-window"]


@pytest.mark.parametrize("family", FAMILIES + WINDOWED)
@pytest.mark.parametrize("overlap", [False, True])
def test_ragged_batch(checkpoints: Checkpoints, rng: np.random.Generator, family: str, overlap: bool) -> None:
    checkpoint = checkpoints(family)
    driver = checkpoint.driver(overlap=overlap)
    prompts = random_prompts(rng, [1, 2, 37, 5, 64, 11, 90, 3, 29, 16, 4])
    counts = [int(n) for n in rng.integers(1, 25, len(prompts))]
    ids = [driver.add(prompt, max_tokens=count) for prompt, count in zip(prompts, counts, strict=True)]
    driver.drain()
    for id, prompt, count in zip(ids, prompts, counts, strict=True):
        answer = driver.answers[id]
        assert_greedy(checkpoint.reference, prompt, answer.tokens, count)
        assert answer.finish == "length"


@pytest.mark.parametrize("family", FAMILIES + WINDOWED)
def test_every_chunk_size(checkpoints: Checkpoints, rng: np.random.Generator, family: str) -> None:
    checkpoint = checkpoints(family)
    (prompt,) = random_prompts(rng, [23])
    for chunk in range(1, len(prompt) + 1):
        driver = checkpoint.driver(max_step_tokens=chunk, max_requests=1)
        assert_greedy(checkpoint.reference, prompt, driver.run(prompt, max_tokens=6).tokens, 6)


@pytest.mark.parametrize("family", FAMILIES + WINDOWED)
def test_prefix_hits(checkpoints: Checkpoints, rng: np.random.Generator, family: str) -> None:
    """A session of turns, each the last one's prompt and answer and some more, then a branch in the
    middle.
    """
    checkpoint = checkpoints(family)
    driver = checkpoint.driver()
    context, computed = random_prompts(rng, [13])[0], 0
    for turn in range(6):
        answer = driver.run(context, max_tokens=9)
        assert_greedy(checkpoint.reference, context, answer.tokens, 9)
        assert answer.cached_tokens == computed // 4 * 4, f"turn {turn}"
        # The last sampled token was never fed, so its place in the cache is empty.
        context = context + answer.tokens
        computed = len(context) - 1
        context = context + random_prompts(rng, [int(rng.integers(1, 9))])[0]
    branch = context[:30] + random_prompts(rng, [10])[0]
    answer = driver.run(branch, max_tokens=5)
    assert_greedy(checkpoint.reference, branch, answer.tokens, 5)
    assert answer.cached_tokens == 28


def test_same_prompt_again_computes_one_block(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    checkpoint = checkpoints("llama")
    driver = checkpoint.driver()
    (prompt,) = random_prompts(rng, [32])
    first, second = driver.run(prompt, max_tokens=4), driver.run(prompt, max_tokens=4)
    assert_same_or_level(checkpoint.reference, prompt, first.tokens, second.tokens)
    assert (first.cached_tokens, second.cached_tokens) == (0, 28)


def test_salts_keep_tenants_apart(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    driver = checkpoints("llama").driver()
    (prompt,) = random_prompts(rng, [32])
    cached = [driver.run(prompt, salt=salt, max_tokens=2).cached_tokens for salt in ("a", "b", "a", "")]
    assert cached == [0, 0, 28, 0]


@pytest.mark.parametrize("family", FAMILIES + WINDOWED)
@pytest.mark.parametrize("overlap", [False, True])
def test_forced_retraction(
    checkpoints: Checkpoints, rng: np.random.Generator, family: str, overlap: bool
) -> None:
    """A pool that holds the longest request but never all of them: some give way and come back, and nobody
    notices.
    """
    checkpoint = checkpoints(family)
    driver = checkpoint.driver(overlap=overlap, memory=1 << 20, max_requests=24)
    capacity = driver.core.ready().cache_tokens
    answer_len = 180
    prompts = random_prompts(rng, [20] * 24)
    ids = [driver.add(prompt, max_tokens=answer_len) for prompt in prompts]
    driver.drain()
    assert driver.core.stats().values["retractions"] > 0, f"capacity of {capacity} tokens was never short"
    for id, prompt in zip(ids, prompts, strict=True):
        assert_greedy(checkpoint.reference, prompt, driver.answers[id].tokens, answer_len)


@pytest.mark.parametrize("overlap", [False, True])
def test_cancellation_in_mid_flight(
    checkpoints: Checkpoints, rng: np.random.Generator, overlap: bool
) -> None:
    from quickturn.engine.messages import CancelRequest

    checkpoint = checkpoints("qwen3")
    driver = checkpoint.driver(overlap=overlap, max_step_tokens=16)
    prompts = random_prompts(rng, [int(n) for n in rng.integers(1, 80, 12)])
    ids = [driver.add(prompt, max_tokens=20) for prompt in prompts]
    cancelled = {int(id) for id in rng.choice(ids, 6, replace=False)}
    for id in sorted(cancelled):
        for _ in range(int(rng.integers(0, 6))):
            driver.step()
        driver.core.cancel(CancelRequest(id))
    driver.drain()
    for id, prompt in zip(ids, prompts, strict=True):
        answer = driver.answers[id]
        assert_greedy(checkpoint.reference, prompt, answer.tokens, len(answer.tokens))
        assert answer.finish == ("cancelled" if id in cancelled and len(answer.tokens) < 20 else "length")
    assert driver.core.stats().values["requests_running"] == 0


def test_stop_ids_end_an_answer(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    checkpoint = checkpoints("llama")
    (prompt,) = random_prompts(rng, [9])
    expected = checkpoint.driver().run(prompt, max_tokens=12).tokens
    assert_greedy(checkpoint.reference, prompt, expected, 12)
    stop = expected[7]
    end = expected.index(stop)
    answer = checkpoint.driver().run(prompt, max_tokens=12, stop_token_ids=(stop,))
    assert (answer.tokens, answer.finish) == (expected[: end + 1], "stop")
    late = checkpoint.driver().run(prompt, max_tokens=12, stop_token_ids=(stop,), min_tokens=end + 2)
    assert late.tokens[:end] == expected[:end]
    # The best of the other tokens, as long as the answer may not end.
    assert stop not in late.tokens[: end + 2]
    assert len(late.tokens) >= end + 2
    with torch.inference_mode():
        logits = checkpoint.reference(torch.tensor([prompt + expected[:end]])).logits[0, -1]
        logits[stop] = -torch.inf
    assert logits[late.tokens[end]] >= logits.max() - TIE


def test_an_answer_that_could_not_end_can_end_later(
    checkpoints: Checkpoints, rng: np.random.Generator
) -> None:
    """A stop token forced by a bias: taken at the first place where it may be."""
    driver = checkpoints("llama").driver(max_requests=2)
    (prompt,) = random_prompts(rng, [9])
    free = driver.add(prompt, max_tokens=8, logit_bias={7: 1000.0})
    ends = [
        driver.add(prompt, max_tokens=8, logit_bias={7: 1000.0}, stop_token_ids=(7,), min_tokens=n)
        for n in (0, 1, 5)
    ]
    driver.drain()
    assert driver.answers[free].tokens == [7] * 8
    for n, id in zip((0, 1, 5), ends, strict=True):
        answer = driver.answers[id]
        assert (len(answer.tokens), answer.tokens.index(7), answer.finish) == (n + 1, n, "stop")


def test_what_can_never_run_is_refused_with_the_numbers(checkpoints: Checkpoints) -> None:
    driver = checkpoints("llama").driver()
    longest = driver.core.ready().max_context
    answer = driver.run([5] * (longest + 1), max_tokens=1)
    assert answer.finish == "error"
    assert str(longest) in answer.error
    assert driver.run([5, 1999], max_tokens=1).error.startswith("a token id is outside the vocabulary")
    assert driver.run([], max_tokens=1).finish == "error"
