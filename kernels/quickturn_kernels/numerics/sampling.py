"""Cases of sample: every option, alone and together; rows that cannot be sampled; logprobs."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Accept, Case, Result
from quickturn_kernels.ops.sampling import GREEDY_BELOW, IN_PROMPT, SamplingTensors, sample
from quickturn_kernels.ops.sampling.reference import adjust, kept, noisy

NUDGE = 3e-5
"""What top-p of this much more or less keeps may be kept too, or min-p of so many times more or less: sums
and exponentials round differently.
"""

TIE = 5e-5
"""Of two tokens whose logit / temperature + noise are this close, either is right."""


@dataclass(frozen=True)
class Options:
    """One call. `spread` scales the logits: small is flat, large is peaked."""

    name: str
    rows: int = 8
    vocabulary: int = 1000
    spread: float = 2.0
    dtype: torch.dtype = torch.float32
    greedy: bool = False
    filters: tuple[str, ...] = ()
    penalties: bool = False
    bias: bool = False
    bitmask: bool = False
    broken: bool = False
    logprobs: int | None = None


OPTIONS = (
    Options("greedy", greedy=True, dtype=torch.bfloat16),
    Options("no rows", rows=0),
    Options("plain", logprobs=0),
    Options("plain, flat, half precision", spread=0.1, dtype=torch.bfloat16),
    Options("tiny vocabulary", vocabulary=7, filters=("top_k", "top_p")),
    Options("top-k", filters=("top_k",)),
    Options("top-k with ties", filters=("top_k",), dtype=torch.bfloat16, spread=0.5),
    Options("top-p", filters=("top_p",)),
    Options("top-p, flat", filters=("top_p",), spread=0.2, vocabulary=777),
    Options("min-p", filters=("min_p",)),
    Options("top-k and min-p", rows=16, filters=("top_k", "min_p"), spread=1.0),
    Options("few of many", rows=16, vocabulary=1500, filters=("top_k",), spread=0.3),
    Options("all filters", filters=("top_k", "top_p", "min_p"), logprobs=3),
    Options("penalties", penalties=True),
    Options("bias and bitmask", bias=True, bitmask=True, filters=("top_p",)),
    Options(
        "everything", filters=("top_k", "top_p", "min_p"), penalties=True, bias=True, bitmask=True, logprobs=2
    ),
    Options("bad rows", broken=True, filters=("top_p",)),
    Options("bad rows, greedy", broken=True, greedy=True),
)


def sampling_cases() -> tuple[Case, ...]:
    """One case for each of the options."""
    return tuple(sampling_case(one) for one in OPTIONS)


def sampling_case(options: Options) -> Case:
    """The case of one call."""
    return Case("sample", options.name, options.dtype, {}, partial(_run, options))


def _run(options: Options, generator: Generator, device: torch.device) -> Result:
    logits, params = build(options, generator)
    moved: dict[str, Any] = {
        name: _apart(value.to(device)) if isinstance(value, Tensor) else value
        for name, value in vars(params).items()
    }
    here = SamplingTensors(**moved)
    logits = logits.to(device)
    found = sample(logits, here, options.logprobs)
    outputs = {"tokens": found.tokens}
    if found.logprobs is not None and not options.broken:
        raw = logits.float().log_softmax(-1)
        error = found.logprobs - raw.gather(1, found.tokens[:, None])[:, 0]
        outputs["logprob error"] = error.round(decimals=4)
    if found.top_logprobs is not None:
        outputs["top"] = found.top_logprobs
    return Result(outputs, {"tokens": _acceptor(logits, here)})


def _apart(values: Tensor) -> Tensor:
    """The same values, their rows apart in memory, as columns of a table are."""
    if values.shape[0] == 0:
        return values
    return torch.stack((values, torch.full_like(values, -7), torch.full_like(values, 7)), dim=1)[:, 0]


def build(options: Options, generator: Generator) -> tuple[Tensor, SamplingTensors]:
    """Logits and parameters on the CPU. Every third row is greedy, every fourth has no filter."""
    rows, vocabulary = options.rows, options.vocabulary
    wide = torch.full((rows, vocabulary + 24), float("nan"))
    wide[:, :vocabulary] = torch.randn(rows, vocabulary, generator=generator) * options.spread
    logits = wide.to(options.dtype)[:, :vocabulary]
    if options.broken:
        logits[0, vocabulary // 2] = float("nan")
        logits[1, 3] = float("inf")
        logits[2] = float("-inf")
        logits[3, : vocabulary - 1] = float("-inf")
    index = torch.arange(rows)
    filtered = index % 4 != 1
    temperature = 0.5 + torch.rand(rows, generator=generator)
    temperature[index % 3 == 2] = 0.0
    # Often no more than there are chunks of the vocabulary, which is a special case of the Triton tier.
    top_k = torch.randint(1, 60, (rows,), generator=generator)
    top_k = top_k.where(torch.rand(rows, generator=generator) < 0.5, 1 + top_k % 6)
    top_p = 0.3 + 0.69 * torch.rand(rows, generator=generator)
    min_p = 0.8 * torch.rand(rows, generator=generator)
    params = SamplingTensors(
        temperature=torch.zeros(rows) if options.greedy else temperature,
        top_k=torch.where(filtered & ("top_k" in options.filters), top_k, 0).int(),
        top_p=torch.where(filtered & ("top_p" in options.filters), top_p, 1.0),
        min_p=torch.where(filtered & ("min_p" in options.filters), min_p, 0.0),
        seeds=torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        positions=torch.randint(0, 2**40, (rows,), generator=generator),
        all_greedy=options.greedy,
        no_filters=not options.filters,
    )
    if options.penalties:
        slots = rows + 3
        counts = torch.randint(0, 3, (slots, vocabulary), generator=generator)
        counts += IN_PROMPT * torch.randint(0, 2, (slots, vocabulary), generator=generator)
        params = replace(
            params,
            presence=torch.rand(rows, generator=generator),
            frequency=torch.rand(rows, generator=generator) - 0.5,
            repetition=0.7 + torch.rand(rows, generator=generator),
            counts=counts.int(),
            count_rows=torch.randperm(slots, generator=generator)[:rows],
        )
    if options.bias:
        ids = torch.stack([torch.randperm(vocabulary, generator=generator)[:5] for _ in range(rows)])
        ids[:, 3] = -1
        params = replace(
            params, bias_ids=ids.int(), bias_values=6 * torch.randn(rows, 5, generator=generator)
        )
    if options.bitmask:
        words = torch.randint(-(2**31), 2**31, (rows, -(-vocabulary // 32)), generator=generator)
        params = replace(params, bitmask=words.int())
    return logits, params


def _acceptor(logits: Tensor, params: SamplingTensors) -> Accept:
    """Right tokens: the reference's own; of a drawn row also one that is as good within rounding, among the
    tokens kept when top_p moves by a hair.
    """

    def accept(expected: Tensor, actual: Tensor) -> bool:
        allowed = actual == expected
        if not params.all_greedy and not bool(allowed.all()):
            adjusted = adjust(logits, params)
            best = adjusted.max(dim=-1).values
            scores = noisy(adjusted, params)
            mine = actual.clamp(min=0)[:, None]
            drawn = (params.temperature >= GREEDY_BELOW) & (actual >= 0) & (expected >= 0)
            for nudge, factor in product((0, NUDGE, -NUDGE), (1, 1 + NUDGE, 1 - NUDGE)):
                top_p = torch.where(params.top_p < 1, params.top_p + nudge, params.top_p)
                hair = replace(params, top_p=top_p, min_p=params.min_p * factor)
                left = scores.where(kept(adjusted, best, hair), float("-inf"))
                behind = left.max(-1).values - left.gather(1, mine)[:, 0]
                allowed |= drawn & (behind <= TIE)
        return bool(allowed.all())

    return accept
