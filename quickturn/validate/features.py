"""What may not change an answer, tried on a running engine: batches, chunks, cached prefixes, retraction,
graphs, overlap, seeds; and that a grammar holds.

Answers of two engines are the same, or part at a token where both choices were level.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quickturn.sampling_params import Constraint, SamplingParams
from quickturn.validate.engine import Answer, Engine
from quickturn.validate.report import Finding

PATTERN = r'\{"name": "(ada|bob)", "ok": (true|false)\}'
"""Every text of it is short: a schema would leave spaces free, and a model may fill an answer with them."""

LEVELS = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.4}
"""Log-probabilities closer than this may change places when another batch rounds them otherwise."""

PARTED_DRAWS = 0.1
"""Share of drawn answers that may part in another batch: a draw is level with another once in some thousand
tokens, and what follows differs.
"""


@dataclass(frozen=True)
class Plan:
    """What the checks run on.

    prompts: token ids, of several lengths. answer: tokens. level: see LEVELS.
    """

    prompts: Sequence[Sequence[int]]
    answer: int
    level: float

    @property
    def greedy(self) -> SamplingParams:
        """Greedy answers of exactly that length, with what stood beside each token."""
        return SamplingParams(max_tokens=self.answer, temperature=0.0, ignore_eos=True, logprobs=5)


def check_alone_and_together(engine: Engine, plan: Plan) -> tuple[list[Answer], list[Finding]]:
    """Answers one by one, which all else is held to, then all at once, again, and longer ones behind them."""
    alone = [engine.ask([prompt], plan.greedy)[0] for prompt in plan.prompts]
    together = engine.ask(plan.prompts, plan.greedy)
    findings = [same("all at once", alone, together, plan.level)]
    again = [engine.ask([prompt], plan.greedy)[0] for prompt in plan.prompts]
    findings.append(_cached(same("cached prompts", alone, again, plan.level), again, plan.prompts, engine))
    split = plan.answer // 2
    longer = [[*prompt, *one.tokens[:split]] for prompt, one in zip(plan.prompts, alone, strict=True)]
    rest = replace(plan.greedy, max_tokens=plan.answer - split)
    grown = [engine.ask([prompt], rest)[0] for prompt in longer]
    tails = [Answer(one.tokens[split:], one.logprobs[split:]) for one in alone]
    findings.append(same("prompts that go on behind cached answers", tails, grown, plan.level))
    return alone, findings


def check_variant(name: str, engine: Engine, plan: Plan, expected: Sequence[Answer]) -> Finding:
    """The same prompts, all at once, on an engine that is set otherwise."""
    return same(name, expected, engine.ask(plan.prompts, plan.greedy), plan.level)


def check_retraction(engine: Engine, plan: Plan, expected: Sequence[Answer], most: int) -> Finding:
    """The same prompts beside at most `most` others, whose prompts fill the cache so that no answer has room
    to grow: requests are retracted, and go on.
    """
    ready = engine.core.ready()
    block = ready.block_tokens
    longest = max(len(prompt) for prompt in plan.prompts)
    left = ready.cache_tokens - sum(-(-len(prompt) // block) * block for prompt in plan.prompts)
    fillers: list[list[int]] = []
    while left > 2 * block and len(fillers) < most:
        length = min(longest, left - block)
        start = len(fillers) + 1
        fillers.append([(start * 31 + 7 * at) % ready.vocab_size for at in range(length)])
        left -= -(-length // block) * block
    # Long enough to want blocks that there aren't.
    growing = SamplingParams(max_tokens=plan.answer + 2 * block, temperature=0.0, ignore_eos=True)
    requests = [(prompt, plan.greedy) for prompt in plan.prompts] + [(one, growing) for one in fillers]
    answers = engine.ask_each(requests)[: len(plan.prompts)]
    found = same("retraction", expected, answers, plan.level)
    retracted = engine.core.stats().values["retractions"]
    found = replace(found, figures={**found.figures, "retractions": retracted})
    if found.status == "passed" and not retracted:
        return replace(found, status="absent", detail="everything fitted, so that nothing was retracted")
    return found


def check_seeds(engine: Engine, plan: Plan) -> Finding:
    """Seeded draws: the same alone twice, and the same in a batch but where two tokens were level."""
    drawn = SamplingParams(max_tokens=plan.answer, temperature=1.0, top_p=0.95, seed=11, ignore_eos=True)
    first = [engine.ask([prompt], drawn)[0].tokens for prompt in plan.prompts]
    second = [engine.ask([prompt], drawn)[0].tokens for prompt in plan.prompts]
    batch = [answer.tokens for answer in engine.ask(plan.prompts, drawn)]
    parted = sum(a != b for a, b in zip(first, batch, strict=True)) / len(first)
    figures = {"parted_share": parted}
    if first != second:
        return Finding("features", "seeds", "failed", "the same seed alone gave other tokens", figures)
    if parted > max(PARTED_DRAWS, 1 / len(first)):
        return Finding("features", "seeds", "failed", f"{parted:.0%} of answers part in a batch", figures)
    return Finding("features", "seeds", "passed", "", figures)


def check_grammar(engine: Engine, plan: Plan, decode: Callable[[Sequence[int]], str] | None) -> Finding:
    """Drawn answers under a regular expression are of that form."""
    if decode is None:
        return Finding("features", "grammar", "absent", "the model comes without a tokenizer")
    if importlib.util.find_spec("xgrammar") is None:
        return Finding("features", "grammar", "absent", "xgrammar is not installed")
    source = json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": PATTERN}})
    for seed, prompt in enumerate(plan.prompts):
        bound = SamplingParams(max_tokens=200, temperature=1.0, seed=seed, constraint=Constraint(source))
        (answer,) = engine.ask([prompt], bound)
        text = decode(answer.tokens)
        if not re.fullmatch(PATTERN, text):
            return Finding("features", "grammar", "failed", f"seed {seed} wrote {text[:200]!r}")
    return Finding("features", "grammar", "passed")


def same(name: str, expected: Sequence[Answer], got: Sequence[Answer], level: float) -> Finding:
    """Whether greedy answers are equal, or part where both tokens were level in the expected one."""
    parted = 0
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one.tokens == other.tokens:
            continue
        pairs = zip(one.tokens, other.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            detail = f"answer {number} has {len(other.tokens)} tokens, not {len(one.tokens)}"
            return Finding("features", name, "failed", detail)
        beside = dict(one.logprobs[at].top)
        behind = one.logprobs[at].logprob - beside.get(other.tokens[at], float("-inf"))
        if not behind <= level:
            detail = f"token {at} of answer {number} is {other.tokens[at]}, {behind:.4g} behind the right one"
            return Finding("features", name, "failed", detail)
        parted += 1
    figures = {"parted_share": parted / max(1, len(expected))}
    return Finding("features", name, "passed", f"{parted} parted where two tokens were level", figures)


def _cached(
    finding: Finding, answers: Sequence[Answer], prompts: Sequence[Sequence[int]], engine: Engine
) -> Finding:
    """The same, failed if a prompt of more than two blocks was computed again."""
    block = engine.core.ready().block_tokens
    cold = [
        len(prompt)
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(prompt) > 2 * block and answer.cached_tokens <= 0
    ]
    if cold and finding.status == "passed":
        return replace(finding, status="failed", detail=f"nothing of {cold} tokens was found in the cache")
    return finding
