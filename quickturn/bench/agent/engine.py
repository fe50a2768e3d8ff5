"""A run on an engine in this process, as its result."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from quickturn.bench.agent import report
from quickturn.bench.agent.load import Load, describe
from quickturn.bench.agent.offline import Offline, warm_up
from quickturn.bench.agent.run import Pace
from quickturn.bench.offline import machine
from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore


def measure_engine(
    config: EngineConfig,
    load: Load,
    pace: Pace,
    label: str,
    gpus: int,
    words: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Start an engine, warm it up, hold the sessions. Raises ValueError or MemoryError, saying what to
    change.
    """
    core = EngineCore(config)
    try:
        return hold_on(core, config, load, pace, label, gpus, words, progress)
    finally:
        core.close()


def hold_on(
    core: EngineCore,
    config: EngineConfig,
    load: Load,
    pace: Pace,
    label: str,
    gpus: int,
    words: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The same on an engine that runs."""
    sessions = load.make()
    vocab_size = core.ready().vocab_size
    seconds = warm_up(core, vocab_size, sessions[: pace.concurrency])
    run = Offline(core, vocab_size, pace).hold(sessions, progress)
    found = report.result(
        run,
        label=label,
        gpus=gpus,
        promise=config.min_tps_per_user,
        load=describe(pace, sessions, load.facts()),
        server={"url": None, "model": config.model, "api": "engine", "models": None},
        client={"in_process": True, "warning": ""},
        warm_up={"seconds": round(seconds, 3)},
        words=words,
    )
    return found | {"machine": machine(), "config": asdict(config), "engine": core.stats().values}
