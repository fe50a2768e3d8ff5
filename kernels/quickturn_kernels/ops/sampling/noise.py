"""The random numbers of sampling: Gumbel noise that is a function of seed, position and token alone.

The word for a token is word `token % 4` of philox4x32-10 (Salmon et al. 2011) with key = seed and counter =
(position's low word, its high word, token // 4, 0). With u = min((word + 1/2) / 2^32, 1 - 2^-24), which is
in (0, 1), -log(1 - u) is exponential and its negative logarithm Gumbel (Gumbel 1954). All of it in float32.
Small u make large noise and decide most draws: there -log(1 - u) is summed as u + u^2/2 + u^3/3 + u^4/4, so
that no bit of u is lost and tokens of any probability come up.
"""

import torch
from torch import Tensor

SERIES_BELOW = 2.0**-6
"""Under this u the fifth term of the series is below float32's precision."""

_WORD = 0xFFFFFFFF


def philox(seeds: Tensor, positions: Tensor, third: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The words, int64 in [0, 2^32), of philox4x32-10 with key = seed and counter = (position, third, 0).

    seeds, positions, third: int64, of shapes that broadcast. Products wrap around in int64, which leaves
    their 64 bits right.
    """
    key0, key1 = seeds & _WORD, (seeds >> 32) & _WORD
    c0, c1 = positions & _WORD, (positions >> 32) & _WORD
    c2, c3 = third, torch.zeros_like(third)
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((second >> 32) & _WORD) ^ c1 ^ key0,
            second & _WORD,
            ((first >> 32) & _WORD) ^ c3 ^ key1,
            first & _WORD,
        )
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Noise [R, vocabulary] float32 of R rows. seeds, positions: int64 [R]."""
    groups = torch.arange(-(-vocabulary // 4), device=seeds.device)
    words = torch.stack(philox(seeds[:, None], positions[:, None], groups[None]), dim=-1)
    return from_words(words.flatten(1)[:, :vocabulary])


def from_words(words: Tensor) -> Tensor:
    """Gumbel noise, float32, of random words, int64 in [0, 2^32)."""
    u = ((words.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    series = u + u * u * (1 / 2 + u * (1 / 3 + u * (1 / 4)))
    return -torch.where(u < SERIES_BELOW, series, -(1.0 - u).log()).log()
