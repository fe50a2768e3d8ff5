"""The meaning of sampling: the reference against formulas written here, which every other tier is then
compared with.
"""

import math
from typing import Any

import pytest
import torch

from quickturn_kernels import IN_PROMPT, SamplingTensors, platform, registry, sample, use
from quickturn_kernels.ops.sampling.noise import from_words, gumbel, philox

DEVICE = torch.device(platform.current().device)
TIERS = [
    one.name for one in registry.implementations("sample") if one.platform.runs_on(platform.describe(DEVICE))
]


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


def on_device(chosen: SamplingTensors) -> SamplingTensors:
    """The same on the device under test."""
    moved: dict[str, Any] = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in vars(chosen).items()
    }
    return SamplingTensors(**moved)


def reference(logits: torch.Tensor, rows: int, **options: object) -> torch.Tensor:
    with use(sample="reference"):
        return sample(logits.expand(rows, -1), params(rows, **options)).tokens


UNLIKELY = 1e-8
"""What is less likely than this doesn't pass for chance. A run looks at some hundred counts."""


def binomial_tail(count: int, draws: int, share: float) -> float:
    """The probability that a count lies as far on its side as `count`: P(X <= count) or P(X >= count), the
    smaller, X binomial.

    Exact for counts of any size. Pearson's statistic isn't chi-square distributed where a token is expected
    less than five times, and random logits have such tokens.
    """

    def probability(k: int) -> float:
        ways = math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1)
        return math.exp(ways + k * math.log(share) + (draws - k) * math.log1p(-share))

    below = math.fsum(probability(k) for k in range(count + 1))
    above = math.fsum(probability(k) for k in range(count, draws + 1))
    return min(below, above)


def test_philox_known_answers() -> None:
    """Random123's known-answer file: key and counter of zeros, and of digits of pi (first words of it)."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(zero, zero, zero)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_noise_is_finite_monotonous_and_keeps_small_probabilities() -> None:
    words = torch.tensor([0, 1, 5, 2**20, 2**26 - 65, 2**26, 2**30, 2**31, 2**32 - 2**20, 2**32 - 1])
    noise = from_words(words)
    assert bool(torch.isfinite(noise).all())
    assert bool((noise[1:] < noise[:-1]).all())
    exact = -(-torch.log1p(-(words.double() + 0.5) * 2.0**-32)).log()
    torch.testing.assert_close(noise[:-1].double(), exact[:-1], rtol=0, atol=1e-5)


def test_noise_is_gumbel_and_independent(seed: int) -> None:
    """Kolmogorov-Smirnov against the Gumbel distribution, and no correlation between neighbouring tokens,
    positions and seeds.
    """
    seeds, positions, tokens = 20, 20, 250
    whose = torch.arange(seeds).repeat_interleave(positions) + seed
    where = torch.arange(positions).repeat(seeds)
    noise = gumbel(whose, where, tokens).reshape(seeds, positions, tokens).double()
    uniform = (-(-noise).exp()).exp().flatten().sort().values
    ranks = torch.arange(1, len(uniform) + 1) / len(uniform)
    # Massart's bound: farther off than this once in 1 / UNLIKELY.
    assert float((uniform - ranks).abs().max()) < math.sqrt(math.log(2 / UNLIKELY) / (2 * len(uniform)))
    assert len(uniform.unique()) > 0.99 * len(uniform)
    centred = (noise - noise.mean()) / noise.std()
    for one, other in (
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[..., 1:], centred[..., :-1]),
        (centred[..., 4:], centred[..., :-4]),
    ):
        assert abs(float((one * other).mean())) < 6 / math.sqrt(one.numel())


def test_noise_of_a_token_is_its_own() -> None:
    """Whatever the vocabulary's size, and for seeds and positions of 64 bits."""
    seeds, positions = torch.tensor([7, -1, 2**62]), torch.tensor([3, 2**40, 0])
    wide = gumbel(seeds, positions, 103)
    assert torch.equal(gumbel(seeds, positions, 10), wide[:, :10])
    assert torch.equal(gumbel(seeds[1:], positions[1:], 103), wide[1:])
    low_words = gumbel(seeds & 0xFFFFFFFF, positions & 0xFFFFFFFF, 103)
    assert not torch.equal(low_words[1], wide[1])
    assert not torch.equal(low_words[2], wide[2])


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_frequencies_follow_the_softmax(seed: int, along: str, name: str) -> None:
    """Each token's count over draws of neighbouring seeds, or of neighbouring positions."""
    # An interpreted row takes 20 ms.
    rows, vocabulary = 250 if name == "triton" and DEVICE.type == "cpu" else 4000, 9
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=generator).to(DEVICE)
    varied = torch.arange(rows) + int(torch.randint(2**40, (1,), generator=generator))
    fixed = torch.full((rows,), seed)
    chosen = params(
        rows,
        temperature=torch.full((rows,), 0.7),
        seeds=varied if along == "seeds" else fixed,
        positions=varied if along == "positions" else fixed,
    )
    with use(sample=name):
        tokens = sample(logits.expand(rows, -1), on_device(chosen)).tokens.cpu()
    shares = (logits.cpu().double() / 0.7).softmax(-1)
    for share, count in zip(shares.tolist(), tokens.bincount(minlength=vocabulary).tolist(), strict=True):
        assert binomial_tail(count, rows, share) > UNLIKELY
    # Neighbouring draws are independent: the two of a pair fall together as often as chance has it. Pairs
    # that share a draw aren't independent of one another, so even and odd ones are counted apart.
    share = float((shares**2).sum())
    for first in (0, 1):
        pairs = tokens[first : first + (rows - first) // 2 * 2].reshape(-1, 2)
        together = int((pairs[:, 0] == pairs[:, 1]).sum())
        assert binomial_tail(together, len(pairs), share) > UNLIKELY


@pytest.mark.parametrize("name", TIERS)
def test_a_hair_changes_a_token_only_where_two_are_level(seed: int, name: str) -> None:
    """Logits in another rounding, and other tokens dropped, leave the choice as it is."""
    rows, vocabulary = 24, 1100
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator) * 2
    moved = logits + 1e-6 * torch.randn(rows, vocabulary, generator=generator)
    chosen = params(rows)
    scores = (logits + gumbel(chosen.seeds, chosen.positions, vocabulary)).topk(2, dim=-1).values
    clear = scores[:, 0] - scores[:, 1] > 1e-4
    assert int(clear.sum()) > rows - 4

    def tokens(values: torch.Tensor, **options: object) -> torch.Tensor:
        with use(sample=name):
            return sample(values.to(DEVICE), on_device(params(rows, **options))).tokens.cpu()

    expected = tokens(logits)
    assert torch.equal(tokens(moved)[clear], expected[clear])
    few = tokens(logits, top_k=torch.full((rows,), 40))
    among = logits.gather(1, expected[:, None])[:, 0] >= logits.topk(40, dim=-1).values[:, -1]
    assert int(among.sum()) > 2
    assert torch.equal(few[among & clear], expected[among & clear])


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
