"""The meaning of sampling: the reference against formulas written here, which every other tier is then
compared with.
"""

import math

import torch

from quickturn_kernels import IN_PROMPT, SamplingTensors, sample, use
from quickturn_kernels.ops.sampling.reference import uniform


def params(rows: int, **options: object) -> SamplingTensors:
    """Temperature 1, no filters, seeds 0, 1, ..."""
    fields: dict[str, object] = {
        "temperature": torch.ones(rows),
        "top_k": torch.zeros(rows, dtype=torch.int32),
        "top_p": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "seeds": torch.arange(rows),
        "positions": torch.full((rows,), 7),
    }
    return SamplingTensors(**{**fields, **options})  # type: ignore[arg-type]


def reference(logits: torch.Tensor, rows: int, **options: object) -> torch.Tensor:
    with use(sample="reference"):
        return sample(logits.expand(rows, -1), params(rows, **options)).tokens


def test_philox_known_answer() -> None:
    """Random123's known-answer file, for key and counter of zeros."""
    zero = torch.zeros(1, dtype=torch.int64)
    assert float(uniform(zero, zero)) == (0x6627E8D5 >> 8) / 2**24


def test_uniform_is_uniform_and_differs_by_seed_and_position() -> None:
    count = 20000
    by_seed = uniform(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    by_position = uniform(torch.zeros(count, dtype=torch.int64), torch.arange(count))
    for values in (by_seed, by_position):
        assert abs(float(values.mean()) - 0.5) < 5 / math.sqrt(12 * count)
        assert abs(float(values.var()) - 1 / 12) < 0.005
        assert values.unique().numel() > count - 30
    assert (by_seed != by_position).sum() > count - 30


def test_frequencies_follow_the_softmax(seed: int) -> None:
    rows = 40000
    logits = torch.randn(9, generator=torch.Generator().manual_seed(seed))
    tokens = reference(logits, rows, temperature=torch.full((rows,), 0.7))
    share = tokens.bincount(minlength=9) / rows
    expected = (logits / 0.7).softmax(-1)
    assert float((share - expected).abs().max()) < 5 * math.sqrt(0.25 / rows)


def kept(logits: list[float], **options: object) -> set[int]:
    """The tokens that come up in many draws."""
    rows = 4000
    return set(reference(torch.tensor(logits), rows, **options).tolist())


def test_filters_keep_what_they_say() -> None:
    logits = [math.log(p) for p in (0.1, 0.4, 0.05, 0.3, 0.15)]
    whole = torch.ones(4000)
    assert kept(logits, top_k=(whole * 2).int()) == {1, 3}
    assert kept(logits, top_k=(whole * 9).int()) == {0, 1, 2, 3, 4}
    assert kept(logits, top_p=whole * 0.69) == {1, 3}
    assert kept(logits, top_p=whole * 0.71) == {1, 3, 4}
    assert kept(logits, top_p=whole * 1e-9) == {1}
    assert kept(logits, min_p=whole * 0.3) == {1, 3, 4}
    # After top-k the rest weighs 0.7: top-p of 0.5 is reached by 0.4 alone (0.57).
    assert kept(logits, top_k=(whole * 2).int(), top_p=whole * 0.5) == {1}
    assert kept(logits, top_k=(whole * 3).int(), min_p=whole * 0.5) == {1, 3}


def test_ties_are_kept_together() -> None:
    whole = torch.ones(4000)
    assert kept([1.0, 2.0, 2.0, 0.0], top_k=whole.int()) == {1, 2}
    assert kept([1.0, 2.0, 2.0, 0.0], top_p=whole * 0.1) == {1, 2}


def test_penalties_bias_and_bitmask() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, 0.5]])
    greedy = {"temperature": torch.zeros(1)}
    one = torch.ones(1)
    counts = torch.zeros(1, 4, dtype=torch.int32)

    def first(**options: object) -> int:
        return int(reference(logits, 1, **greedy, **options)[0])

    def penalised(seen: int, presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0) -> int:
        changed = counts.clone()
        changed[0, 0] = seen
        return first(
            presence=one * presence, frequency=one * frequency, repetition=one * repetition, counts=changed
        )

    assert penalised(seen=0, presence=2.0, frequency=2.0, repetition=2.0) == 0
    assert penalised(seen=1, presence=0.2) == 1
    assert penalised(seen=1, frequency=0.06) == 0
    assert penalised(seen=2, frequency=0.06) == 1
    assert penalised(seen=1, repetition=1.1) == 1
    # Prompt tokens repeat, but were not generated.
    assert penalised(seen=IN_PROMPT, repetition=1.1) == 1
    assert penalised(seen=IN_PROMPT, presence=2.0, frequency=2.0) == 0
    ids = torch.tensor([[3, -1]], dtype=torch.int32)
    assert first(bias_ids=ids, bias_values=torch.tensor([[1.6, 9.0]])) == 3
    assert first(bitmask=torch.tensor([[0b1010]], dtype=torch.int32)) == 1


def test_a_token_depends_on_its_own_row_only(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 50, generator=generator)
    together = reference_rows(logits, torch.arange(6))
    order = torch.tensor([4, 0, 5])
    assert torch.equal(reference_rows(logits[order], order), together[order])


def reference_rows(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    rows = logits.shape[0]
    with use(sample="reference"):
        return sample(logits, params(rows, seeds=seeds, top_p=torch.full((rows,), 0.9))).tokens


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    with use(sample="reference"):
        found = sample(
            logits, params(1, temperature=torch.zeros(1), bitmask=torch.tensor([[0b0111]]).int()), 2
        )
    expected = logits.log_softmax(-1)
    assert found.tokens.tolist() == [2]
    assert found.logprobs is not None
    assert found.top_tokens is not None
    assert found.top_logprobs is not None
    torch.testing.assert_close(found.logprobs, expected[:, 2])
    assert found.top_tokens.tolist() == [[3, 2]]
    torch.testing.assert_close(found.top_logprobs, expected[:, [3, 2]])
