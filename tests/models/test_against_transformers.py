"""Logits and greedy tokens of every family and option, against transformers in float32."""

import random
from collections.abc import Callable

import pytest
import torch
from paged import PagedCache, PagedRequest, greedy
from routers import decided_logits
from tiny import OPTIONS, TINY
from transformers import PreTrainedModel

from quickturn.models.base import Model

TOLERANCE = 2e-4
RECURRENT_TOLERANCE = 1e-2
"""transformers' own two ways through a gated delta net, at once and token by token, are 1e-3 apart here."""


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, TINY["vocab_size"]) for _ in range(count)]


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_of_ragged_batches(option: str, pair: Callable[[str], tuple[PreTrainedModel, Model]]) -> None:
    """Every token's logits, fed in random chunks of random requests, decode rows and padding among them."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    reference, model = pair(option)
    sequences = [tokens(rng, length) for length in (1, 7, 23, 40, 61)]
    cache = PagedCache(model, num_blocks=60, block_tokens=4, seed=seed)
    requests = [PagedRequest() for _ in sequences]
    got: list[list[torch.Tensor]] = [[] for _ in sequences]
    while live := [i for i, ids in enumerate(sequences) if requests[i].cached < len(ids)]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        work = []
        for i in chosen:
            at = requests[i].cached
            count = 1 if at and rng.random() < 0.6 else rng.randint(1, 20)
            work.append((i, sequences[i][at : at + count]))
        work.sort(key=lambda item: not (len(item[1]) == 1 and requests[item[0]].cached > 0))
        padding = rng.choice((0, 0, 2))
        decoding = sum(len(ids) == 1 and requests[i].cached > 0 for i, ids in work)
        batch = cache.batch([(requests[i], ids) for i, ids in work], padding_rows=padding)
        logits = model.forward(batch)
        assert logits.dtype == torch.float32
        kept = torch.cat((logits[:decoding], logits[decoding + padding :]))
        for (i, _), part in zip(work, kept.split([len(ids) for _, ids in work]), strict=True):
            got[i].append(part)
    for ids, parts in zip(sequences, got, strict=True):
        tolerance = RECURRENT_TOLERANCE if model.architecture.recurrent() else TOLERANCE
        expected, decided = decided_logits(reference, torch.tensor([ids]))
        found = torch.cat(parts)
        assert found.shape == expected[0].shape
        torch.testing.assert_close(found[decided[0]], expected[decided], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("option", OPTIONS)
def test_greedy_tokens(option: str, pair: Callable[[str], tuple[PreTrainedModel, Model]]) -> None:
    """Continuous batching of prompts of unequal length gives the tokens that transformers gives to each
    alone.
    """
    reference, model = pair(option)
    rng = random.Random(5)
    prompts = [tokens(rng, length) for length in (3, 14, 31)]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(reference_logits(reference, ids)[-1].argmax()))
        expected.append(ids[len(prompt) :])
    for chunk in (1, 5, 64):
        cache = PagedCache(model, num_blocks=60, block_tokens=4, seed=chunk)
        assert greedy(model, cache, prompts, 12, chunk) == expected


def test_no_sampled_rows(pair: Callable[[str], tuple[PreTrainedModel, Model]]) -> None:
    """A prefill chunk that samples nothing still fills the cache."""
    from dataclasses import replace

    reference, model = pair("llama")
    ids = tokens(random.Random(1), 20)
    cache = PagedCache(model, num_blocks=60, block_tokens=4, seed=1)
    request = PagedRequest()
    nothing = replace(cache.batch([(request, ids[:13])]), sample_rows=torch.empty(0, dtype=torch.int64))
    assert model.forward(nothing).shape == (0, TINY["vocab_size"])
    logits = model.forward(cache.batch([(request, ids[13:])], sample_all=False))
    torch.testing.assert_close(
        logits[0], reference_logits(reference, ids)[-1], atol=TOLERANCE, rtol=TOLERANCE
    )
