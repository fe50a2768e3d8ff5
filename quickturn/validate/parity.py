"""The engine as it runs against the reference tier, token by token, over long contexts and long answers.

Both see the same text: a prompt and the greedy answer that the engine under test gave to it. Of that text the
reference scores every token in one prompt; the engine under test scored the prompt as a prompt and the answer
as it decoded. What differs is rounding, which stays small and doesn't grow, or a fault.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quickturn.engine.messages import TokenLogprobs
from quickturn.sampling_params import SamplingParams
from quickturn.validate.engine import Answer, Engine
from quickturn.validate.report import Finding

TOP = 20
"""Alternatives that are compared beside the token itself."""

TAIL = -12.0
"""Log-probabilities below are not compared."""


@dataclass(frozen=True)
class Tolerance:
    """How far log-probabilities may differ: one of them, and all in the mean, in nats."""

    one: float
    mean: float


TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(5e-3, 5e-4),
    "float16": Tolerance(0.15, 0.02),
    "bfloat16": Tolerance(1.0, 0.12),
}
"""By dtype; half as much again as a small real model differs by on random text, at the least."""

FP8_SLACK = 4.0
"""Times that with weights or a cache in 8 bits, where the reference has them, too."""


@dataclass(frozen=True)
class Text:
    """A prompt, and what the engine under test said: of the prompt, and behind it."""

    prompt: Sequence[int]
    answer: Answer
    scored: Sequence[TokenLogprobs]


def write(engine: Engine, prompts: Sequence[Sequence[int]], answer_tokens: int) -> list[Text]:
    """Greedy answers to the prompts, one at a time, with what the engine thought of every token."""
    texts = []
    for prompt in prompts:
        greedy = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True, logprobs=TOP)
        (answer,) = engine.ask([prompt], greedy)
        (scored,) = engine.ask(
            [prompt], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=TOP)
        )
        texts.append(Text(prompt, answer, scored.scored))
    return texts


def compare(reference: Engine, texts: Sequence[Text], tolerance: Tolerance) -> list[Finding]:
    """What the reference thinks of the same tokens."""
    findings = []
    for text in texts:
        whole = [*text.prompt, *text.answer.tokens]
        (expected,) = reference.ask(
            [whole], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=TOP)
        )
        split = len(text.prompt) - 1
        label = f"{len(text.prompt)} tokens of prompt"
        findings.append(_judge(f"prefill, {label}", expected.scored[:split], text.scored, 1, tolerance))
        label = f"{len(text.answer.tokens)} tokens behind {len(text.prompt)}"
        findings.append(
            _judge(f"decode, {label}", expected.scored[split:], text.answer.logprobs, split + 1, tolerance)
        )
        findings.append(_greedy(label, expected.scored[split:], tolerance))
    return findings


def _judge(
    name: str,
    expected: Sequence[TokenLogprobs],
    got: Sequence[TokenLogprobs],
    first: int,
    tolerance: Tolerance,
) -> Finding:
    """Differences token by token; `first` is the position of the first one."""
    if len(expected) != len(got):
        return Finding("parity", name, "failed", f"{len(got)} tokens were scored, not {len(expected)}")
    differences = [apart_by(one, other) for one, other in zip(expected, got, strict=True)]
    if not differences:
        return Finding("parity", name, "absent", "no token to score")
    apart = [max(token) for token in differences]
    means = [sum(token) / len(token) for token in differences]
    half = len(means) // 2
    figures = {
        "largest_nats": max(apart),
        "mean_nats": sum(means) / len(means),
        "mean_first_half_nats": sum(means[:half]) / max(1, half),
        "mean_second_half_nats": sum(means[half:]) / (len(means) - half),
    }
    worst = apart.index(max(apart))
    if not max(apart) <= tolerance.one:
        detail = f"at position {first + worst} a log-probability is off by {apart[worst]:.4g}"
        return Finding("parity", name, "failed", f"{detail}, more than {tolerance.one}", figures)
    if not figures["mean_nats"] <= tolerance.mean:
        detail = f"log-probabilities are off by {figures['mean_nats']:.4g} in the mean"
        return Finding("parity", name, "failed", f"{detail}, more than {tolerance.mean}", figures)
    return Finding("parity", name, "passed", f"furthest off at position {first + worst}", figures)


def apart_by(one: TokenLogprobs, other: TokenLogprobs) -> list[float]:
    """The differences between two accounts of one token: of the token itself, and of the likely ones that
    both name; infinite where a number is none.
    """
    others = dict(other.top)
    pairs = [(one.logprob, other.logprob), *((value, others[t]) for t, value in one.top if t in others)]
    # Far down the tail a hair of a logit is of no consequence, and 16-bit logits are coarse.
    near = [(a, b) for a, b in pairs if max(a, b) > TAIL or not math.isfinite(a + b)]
    return [abs(a - b) if math.isfinite(a - b) else math.inf for a, b in near] or [0.0]


def _greedy(label: str, expected: Sequence[TokenLogprobs], tolerance: Tolerance) -> Finding:
    """Each token of a greedy answer is the reference's own, or level with it."""
    behind = [max(value for _, value in token.top) - token.logprob for token in expected if token.top]
    if not behind:
        return Finding("parity", f"greedy tokens, {label}", "absent", "no token to compare")
    figures = {
        "same_share": sum(gap <= 0.0 for gap in behind) / len(behind),
        "furthest_behind_nats": max(behind),
    }
    name = f"greedy tokens, {label}"
    # Either of two level tokens may win by what both sides rounded.
    if max(behind) <= 2 * tolerance.one:
        return Finding("parity", name, "passed", "", figures)
    at = behind.index(max(behind))
    detail = f"token {at} of the answer is {max(behind):.4g} behind the reference's best"
    return Finding("parity", name, "failed", detail, figures)
