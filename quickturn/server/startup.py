"""Starts an engine process and loads the text side of its model meanwhile."""

import asyncio
from collections.abc import Callable
from typing import Any

from quickturn.config import EngineConfig
from quickturn.engine.client import EngineClient
from quickturn.engine.messages import LoadProgress
from quickturn.engine.process import DEFAULT_CORE
from quickturn.text.tokenizer import Tokenizer, load_tokenizer


async def start_engine(
    config: EngineConfig,
    progress: Callable[[LoadProgress], None] | None = None,
    core: str = DEFAULT_CORE,
    log_level: str = "info",
) -> tuple[EngineClient, Tokenizer]:
    """A serving engine and its model's tokenizer. `core` names the class that the process runs.

    Raises EngineDied or ValueError with a message for the user when either can't be had; no process is left
    then.
    """
    engine = EngineClient(config, core, log_level.upper())
    started = asyncio.create_task(engine.start(progress))
    text = asyncio.create_task(asyncio.to_thread(load_tokenizer, config.model))
    try:
        both: set[asyncio.Task[Any]] = {started, text}
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if text.done():
            text.result()
        await started
        return engine, await text
    except BaseException:
        started.cancel()
        await asyncio.gather(started, text, return_exceptions=True)
        await engine.close()
        raise
