"""One validation: kernels, then the engine against itself and the reference tier, then its speed."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from quickturn_kernels import counted, use
from quickturn_kernels.registry import override_from_text

from quickturn.config import EngineConfig
from quickturn.engine.start import STATE_DTYPES, pick_device
from quickturn.loading.dtype import resolve_dtype
from quickturn.loading.load import declared_model
from quickturn.validate import features, parity, performance
from quickturn.validate.engine import Answer, Engine
from quickturn.validate.environment import environment
from quickturn.validate.numerics import check_numerics
from quickturn.validate.report import Finding, Report
from quickturn.validate.shapes import Setting, model_cases

SECTIONS = ("numerics", "parity", "features", "performance")

SMALL_STEP = 96
"""Tokens of a step of the engine that cuts prompts up."""

MOST_FILLERS = 24
"""Requests that fill the cache where retraction is tried."""

Show = Callable[[str], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings:
    """What to validate, and how thoroughly.

    kernels: overrides as in QUICKTURN_KERNELS. expect: "op=implementation" or "step=kind" that must have been
    taken. lengths: prompt lengths for parity and features. answer: greedy tokens behind each. sweep: the
    longest context that kernels are swept to. rows: tokens of a step that kernels are tried with. repeats:
    runs of each kernel on one input. every: all implementations that run here, not only the one taken.
    """

    engine: EngineConfig
    sections: tuple[str, ...] = SECTIONS
    kernels: str = ""
    expect: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (33, 700, 4096)
    answer: int = 96
    sweep: int = 1024
    rows: tuple[int, ...] = (1, 2, 5, 8, 33, 130)
    repeats: int = 5
    every: bool = False
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (1024, 4096)
    steps: int = 32
    seed: int = 0


def validate(
    settings: Settings,
    decode: Callable[[Sequence[int]], str] | None,
    show: Show,
    progress: Progress,
) -> Report:
    """Run the sections asked for. `decode` turns an answer's ids into text, None where there is no tokenizer;
    `show` gets every finding that isn't a pass, as a line.

    Raises what an engine raises that can't start, KeyError and ValueError for overrides that can't be.
    """
    findings: list[Finding] = []

    def take(found: Finding) -> None:
        findings.append(found)
        if found.status == "failed" or found.section == "performance":
            show(f"{found.status} {found.section}: {found.name}: {found.detail}")

    paths: Counter[str] = Counter()
    with _overridden(settings.kernels), counted() as calls:
        if "numerics" in settings.sections:
            for finding in _numerics(settings, progress):
                take(finding)
        # What the kernels' own cases called is no sign that the model does.
        calls.clear()
        for finding in _engine(settings, decode, paths):
            take(finding)
        if "performance" in settings.sections:
            device = pick_device(settings.engine.device)
            for finding in performance.measure(
                settings.engine,
                device,
                batches=settings.batches,
                contexts=settings.contexts,
                steps=settings.steps,
                repeats=3,
            ):
                take(finding)
        paths.update({f"{op}={name}": count for (op, name), count in calls.items() if count})
    for finding in expected(settings.expect, paths):
        take(finding)
    return Report(asdict(settings), environment(), findings, dict(sorted(paths.items())))


def expected(wanted: Sequence[str], paths: Counter[str]) -> Iterator[Finding]:
    """Whether each path that was to be tested was taken."""
    for path in wanted:
        if paths[path]:
            yield Finding("paths", path, "passed", f"taken {paths[path]} times", {"taken": paths[path]})
            continue
        kind = path.partition("=")[0]
        others = {name: count for name, count in paths.items() if name.startswith(f"{kind}=")}
        yield Finding("paths", path, "failed", f"never taken; instead: {others or 'nothing of that kind'}")


@contextmanager
def _overridden(text: str) -> Iterator[None]:
    with use():
        if text:
            override_from_text(text)
        yield


def _numerics(settings: Settings, progress: Progress) -> Iterator[Finding]:
    config = settings.engine
    device = pick_device(config.device)
    setting = Setting(
        dtype=resolve_dtype(config.dtype, device),
        state_dtype=STATE_DTYPES[config.state_dtype],
        block_tokens=config.block_tokens,
        context=settings.sweep,
        rows=settings.rows,
        fp8_cache=config.kv_cache_dtype == "fp8",
        fp8_weights=config.quantization == "fp8",
    )
    cases = model_cases(declared_model(config), setting)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(done, len(cases))

    yield from check_numerics(cases, device, settings.seed, settings.repeats, settings.every, step)


def _engine(
    settings: Settings, decode: Callable[[Sequence[int]], str] | None, paths: Counter[str]
) -> Iterator[Finding]:
    """Features, and parity; the engine under test starts once, others for what can't be had from it."""
    config = settings.engine
    wanted = {"features", "parity"} & set(settings.sections)
    if not wanted:
        return
    level = features.LEVELS[_dtype_name(config)]
    texts: list[parity.Text] = []
    alone: list[Answer] = []
    with _started(config, paths) as engine:
        plan = features.Plan(_prompts(settings, engine), settings.answer, level)
        if "features" in wanted:
            alone, findings = features.check_alone_and_together(engine, plan)
            yield from findings
            yield features.check_seeds(engine, plan)
            yield features.check_grammar(engine, plan, decode)
            yield Finding("features", "speculation", "absent", "this engine doesn't speculate")
        if "parity" in wanted:
            texts = parity.write(engine, plan.prompts, settings.answer)
        cache_bytes = engine.core.cache_bytes
        cache_tokens = engine.core.ready().cache_tokens
    if alone:
        yield from _variants(config, plan, alone, cache_bytes / cache_tokens, paths)
    if texts:
        tolerance = parity.TOLERANCES[_dtype_name(config)]
        if config.quantization not in ("none", "auto") or config.kv_cache_dtype != "auto":
            slack = parity.FP8_SLACK
            tolerance = parity.Tolerance(tolerance.one * slack, tolerance.mean * slack)
        plain = replace(config, graphs=False, overlap=False)
        with use(**{"*": "reference"}), counted(), Engine(plain) as reference:
            yield from parity.compare(reference, texts, tolerance)
        _free()


def _variants(
    config: EngineConfig,
    plan: features.Plan,
    expected: Sequence[Answer],
    token_bytes: float,
    paths: Counter[str],
) -> Iterator[Finding]:
    """Engines that go about it in other ways: no cached prefixes, small chunks, nothing recorded or
    overlapped; and one that is too small for the answers, and has to retract.
    """
    plain = replace(config, prefix_cache=False, graphs=False, overlap=False)
    with _started(plain, paths) as engine:
        yield features.check_variant("no graphs, overlap or cached prefixes", engine, plan, expected)
    small = replace(plain, max_step_tokens=SMALL_STEP, max_requests=max(2, len(plan.prompts)))
    with _started(small, paths) as engine:
        name = f"steps of {SMALL_STEP} tokens"
        yield features.check_variant(name, engine, plan, expected)
    total = sum(len(prompt) + plan.answer for prompt in plan.prompts)
    memory = max(1 << 20, int((total + 4 * config.block_tokens) * token_bytes))
    tight = replace(config, memory=memory, max_requests=MOST_FILLERS + len(plan.prompts))
    try:
        with _started(tight, paths) as engine:
            yield features.check_retraction(engine, plan, expected, MOST_FILLERS)
    except (MemoryError, ValueError) as error:
        yield Finding("features", "retraction", "absent", f"no engine so tight starts: {error}")


@contextmanager
def _started(config: EngineConfig, paths: Counter[str]) -> Iterator[Engine]:
    with Engine(config) as engine:
        try:
            yield engine
        finally:
            paths.update({f"step={kind}": count for kind, count in engine.steps().items() if count})
    del engine
    _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _prompts(settings: Settings, engine: Engine) -> list[list[int]]:
    """Random ids with runs that come again, as agents' contexts have, of the lengths that fit."""
    ready = engine.core.ready()
    rng = np.random.default_rng(settings.seed)
    prompts = []
    for length in settings.lengths:
        size = min(length, ready.max_context - settings.answer - 1, ready.cache_tokens - settings.answer - 1)
        words = [rng.integers(0, ready.vocab_size, rng.integers(3, 30)).tolist() for _ in range(40)]
        text: list[int] = []
        while len(text) < size:
            text += words[int(rng.integers(len(words)))]
        prompts.append(text[: max(1, size)])
    return prompts


def _dtype_name(config: EngineConfig) -> str:
    return str(resolve_dtype(config.dtype, pick_device(config.device))).removeprefix("torch.")
