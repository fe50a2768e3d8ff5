"""Starts an engine process and loads the text side of its model meanwhile."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quickturn.config import EngineConfig
from quickturn.engine.client import EngineClient
from quickturn.engine.messages import LoadProgress
from quickturn.engine.process import DEFAULT_CORE
from quickturn.text.chat_template import ChatTemplate
from quickturn.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Started:
    """A serving engine, and what turns its tokens into text. `template` is None for a model that can't
    chat.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None


async def start_engine(
    config: EngineConfig,
    progress: Callable[[LoadProgress], None] | None = None,
    core: str = DEFAULT_CORE,
    log_level: str = "info",
) -> Started:
    """Start the engine of a model and load its text side. `core` names the class that the process runs.

    Raises EngineDied, ValueError or OSError with a message for the user when either can't be had; no process
    is left then.
    """
    engine = EngineClient(config, core, log_level.upper())
    started = asyncio.create_task(engine.start(progress))
    text = asyncio.create_task(asyncio.to_thread(_load_text, config.model))
    try:
        both: set[asyncio.Task[Any]] = {started, text}
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        if text.done():
            text.result()
        await started
        tokenizer, template = await text
        return Started(engine, tokenizer, template)
    except BaseException:
        started.cancel()
        await asyncio.gather(started, text, return_exceptions=True)
        await engine.close()
        raise


def _load_text(model: str) -> tuple[Tokenizer, ChatTemplate | None]:
    """All of the text side that can fail, so that it does while the engine starts and not at a request."""
    tokenizer = load_tokenizer(model)
    _ = tokenizer.vocabulary
    source = tokenizer.chat_template
    return tokenizer, None if source is None else ChatTemplate(source, tokenizer.special)
