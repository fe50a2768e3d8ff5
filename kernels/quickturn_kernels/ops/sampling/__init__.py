"""Choosing the next token of every row."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quickturn_kernels.registry import Op, define

IN_PROMPT = 1 << 30
"""Set in `SamplingTensors.counts` for tokens of the prompt; the bits below count the times a token was
generated.
"""

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy."""


@dataclass(frozen=True)
class SamplingTensors:
    """How each of R rows wants its token chosen; all tensors lie on the device of the logits, and may be
    columns of wider tables.

    temperature: [R] float32, 0 is greedy. top_k: [R] int32, 0 is off. top_p: [R] float32, 1 is off. min_p:
    [R] float32, 0 is off. seeds: [R] int64. positions: [R] int64, the position in its context of the token
    to be chosen.

    presence, frequency, repetition: [R] float32, all three or none (0, 0 and 1 are off), and then counts:
    [S, V] int32, the tokens seen, row r's in `counts[count_rows[r]]` (count_rows: [R] int64; None: in
    `counts[r]`). bias_ids: [R, B] int32, no token twice in a row, -1 unused, with bias_values: [R, B]
    float32. bitmask: [R, ceil(V / 32)] int32, bit `i % 32` of word `i // 32` allows token i (as xgrammar
    packs it).

    all_greedy, no_filters: the host knows that every row is greedy, or has neither top_k nor top_p nor
    min_p; hints that save work and change nothing.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    presence: Tensor | None = None
    frequency: Tensor | None = None
    repetition: Tensor | None = None
    counts: Tensor | None = None
    count_rows: Tensor | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    bitmask: Tensor | None = None
    all_greedy: bool = False
    no_filters: bool = False


@dataclass(frozen=True)
class Sampled:
    """The chosen tokens: [R] int64, -1 where nothing can be chosen (a NaN or infinite logit, or every token
    forbidden).

    logprobs: [R] float32, the chosen tokens' log-probability under softmax of the raw logits, before
    penalties and temperature. top_tokens: [R, n] int64 and top_logprobs: [R, n] float32, the n likeliest,
    best first. None unless asked for.
    """

    tokens: Tensor
    logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


_SAMPLE: Op[Callable[[Tensor, SamplingTensors, int | None], Sampled]] = define("sample")


def sample(logits: Tensor, params: SamplingTensors, num_logprobs: int | None = None) -> Sampled:
    """Choose one token a row.

    logits: [R, V] of a floating dtype, not changed. In float32, in this order: repetition penalty (seen
    tokens: positive logits are divided by it, others multiplied), frequency * count and presence (generated
    tokens) subtracted, bias added, tokens outside the bitmask dropped; greedy rows then take the first
    largest logit. Other rows: p = softmax(logits / temperature); top-k keeps p >= the k-th largest; top-p
    keeps, of what is left and renormalised, p >= t for the largest t such that their sum reaches top_p;
    min-p keeps p >= min_p * max p. All three keep ties, so none needs an order among equals. Of the tokens
    kept the one with the largest logit / temperature + noise is taken, where the noise is Gumbel and a
    function of the row's seed, its position and the token alone (`noise.py` says which): a draw from the
    softmax (Gumbel 1954, Maddison et al. 2014) that other rows don't touch, that dropping other tokens
    doesn't change, and that logits which differ in their last bits change only where two candidates are
    that close.

    num_logprobs: None, or how many of the likeliest tokens to report beside the chosen one.
    """
    function = _SAMPLE.table.get((logits.device, logits.dtype))
    if function is None:
        function = _SAMPLE.bind(logits.device, logits.dtype)
    return function(logits, params, num_logprobs)
