"""Sampling through the whole engine: seeds, neighbours, penalties, logprobs."""

import numpy as np
import pytest
import torch
from driving import TIE, Checkpoints, assert_drawn, greedy, penalised, random_prompts


def test_a_seed_fixes_the_tokens_whatever_else_runs(
    checkpoints: Checkpoints, rng: np.random.Generator
) -> None:
    checkpoint = checkpoints("llama")
    (prompt,) = random_prompts(rng, [12])
    wanted = {"temperature": 1.3, "top_p": 0.95, "top_k": 50, "seed": 42, "max_tokens": 15}
    alone = checkpoint.driver().run(prompt, **wanted).tokens
    driver = checkpoint.driver(max_step_tokens=8)
    for other in random_prompts(rng, [3, 30, 7]):
        driver.add(other, temperature=1.0, max_tokens=25)
    id = driver.add(prompt, **wanted)
    driver.drain()
    assert driver.answers[id].tokens == alone
    assert checkpoint.driver().run(prompt, **(wanted | {"seed": 43})).tokens != alone


def test_draws_follow_the_formula(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    """Logit / temperature + noise on transformers' logits, token by token."""
    checkpoint = checkpoints("qwen3")
    driver = checkpoint.driver(max_step_tokens=16)
    prompts = random_prompts(rng, [30, 1, 12])
    for seed, prompt in enumerate(prompts):
        driver.add(prompt, seed=seed, temperature=0.6, max_tokens=30)
    driver.drain()
    for seed, (prompt, answer) in enumerate(zip(prompts, driver.answers.values(), strict=True)):
        assert len(answer.tokens) == 30
        assert_drawn(checkpoint.reference, prompt, answer.tokens, seed=seed, temperature=0.6)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_seed_survives_retraction(
    checkpoints: Checkpoints, rng: np.random.Generator, overlap: bool
) -> None:
    """Computed in other batches, logits differ in their last bits; that alone may change a token, and only
    one of two that are level.
    """
    checkpoint = checkpoints("llama")
    prompts = random_prompts(rng, [20] * 24)
    roomy = checkpoint.driver(memory=64 << 20, max_requests=24, overlap=overlap)
    tight = checkpoint.driver(memory=1 << 20, max_requests=24, overlap=overlap)
    for driver in (roomy, tight):
        for seed, prompt in enumerate(prompts):
            driver.add(
                prompt,
                seed=seed,
                temperature=1.0,
                max_tokens=120,
                presence_penalty=0.5,
                repetition_penalty=1.1,
            )
        driver.drain()
    assert tight.core.stats().values["retractions"] > 0
    pairs = zip(roomy.answers.values(), tight.answers.values(), strict=True)
    for seed, (prompt, answers) in enumerate(zip(prompts, pairs, strict=True)):
        for answer in answers[: 2 if answers[0].tokens != answers[1].tokens else 1]:
            assert len(answer.tokens) == 120
            assert_drawn(
                checkpoint.reference,
                prompt,
                answer.tokens,
                seed=seed,
                temperature=1.0,
                presence=0.5,
                repeat=1.1,
            )


def test_penalties_follow_the_formula(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    """Greedy under penalties, token by token, against the formula on transformers' logits."""
    checkpoint = checkpoints("qwen2")
    (prompt,) = random_prompts(rng, [10])
    presence, frequency, repetition = 0.7, 0.4, 1.3
    got = checkpoint.driver().run(
        prompt,
        max_tokens=12,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    assert len(got.tokens) == 12
    for place, token in enumerate(got.tokens):
        before = got.tokens[:place]
        with torch.no_grad():
            logits = checkpoint.reference(torch.tensor([prompt + before])).logits[0, -1]
        changed = penalised(logits, prompt, before, presence, frequency, repetition)
        assert changed[token] >= changed.max() - TIE, place


def test_logit_bias_bans_and_forces(checkpoints: Checkpoints, rng: np.random.Generator) -> None:
    checkpoint = checkpoints("llama")
    (prompt,) = random_prompts(rng, [10])
    first = greedy(checkpoint.reference, prompt, 1)[0]
    assert first not in checkpoint.driver().run(prompt, max_tokens=8, logit_bias={first: -1000.0}).tokens
    assert checkpoint.driver().run(prompt, max_tokens=3, logit_bias={7: 1000.0}).tokens == [7, 7, 7]


def test_logprobs_are_those_of_the_raw_distribution(
    checkpoints: Checkpoints, rng: np.random.Generator
) -> None:
    checkpoint = checkpoints("qwen3")
    (prompt,) = random_prompts(rng, [10])
    driver = checkpoint.driver()
    plain = driver.add(prompt, max_tokens=4)
    id = driver.add(prompt, max_tokens=6, logprobs=3, temperature=0.7, seed=1)
    driver.drain()
    assert all(output.logprobs is None for output in driver.answers[plain].outputs)
    context = list(prompt)
    for output in driver.answers[id].outputs:
        (token,), (details,) = output.tokens, output.logprobs or []
        with torch.inference_mode():
            expected = checkpoint.reference(torch.tensor([context])).logits[0, -1].log_softmax(-1)
        assert abs(details.logprob - float(expected[token])) < 1e-3
        # Of tokens as likely as each other any may come first.
        ids, values = zip(*details.top, strict=True)
        assert len(set(ids)) == 3
        assert np.allclose(values, expected.topk(3).values.tolist(), atol=1e-3)
        assert np.allclose(values, expected[list(ids)].tolist(), atol=1e-3)
        context.append(token)
