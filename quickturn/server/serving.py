"""Runs the HTTP server around an engine process, from the first progress report to the last answered
request."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import uvicorn

from quickturn.config import EngineConfig
from quickturn.engine.messages import EngineReady, LoadProgress
from quickturn.engine.process import DEFAULT_CORE
from quickturn.engine.stream import EngineDied
from quickturn.files.resolve import display_name
from quickturn.server.app import build_app
from quickturn.server.direct import DirectProtocol
from quickturn.server.startup import start_engine
from quickturn.server.state import Limits, ServerState
from quickturn.server.waiting_room import Promise, QueueLimits, WaitingRoom
from quickturn.text.answer_format import AUTO, choose_format, markup_of
from quickturn.text.rendering import WrittenAnswers

_POLL_S = 0.05
_GRACE_S = 2
_BACKLOG = 2048

log = logging.getLogger("quickturn.server")


@dataclass(frozen=True)
class ServeConfig:
    """How to serve. `shutdown_timeout`: seconds that running requests get after SIGTERM. `tool_parser` and
    `reasoning_parser`: names of formats, 'auto' to go by the chat template, 'none' for plain text.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: frozenset[str] = frozenset()
    cors_origins: tuple[str, ...] = ()
    shutdown_timeout: float = 30.0
    limits: Limits = field(default_factory=Limits)
    queue: QueueLimits = field(default_factory=QueueLimits)
    core: str = DEFAULT_CORE
    log_level: str = "info"
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO


async def start_state(
    engine_config: EngineConfig, config: ServeConfig, progress: Callable[[LoadProgress], None] | None = None
) -> ServerState:
    """The engine and the text side of a model as one state.

    Raises EngineDied or ValueError with a message for the user when either can't be had.
    """
    name = engine_config.served_model_name or display_name(engine_config.model)
    choose_format("", config.tool_parser, config.reasoning_parser)
    started = await start_engine(engine_config, progress, config.core, config.log_level)
    markup = markup_of(started.tokenizer, config.tool_parser, config.reasoning_parser)
    return ServerState(
        engine=started.engine,
        tokenizer=started.tokenizer,
        template=started.template,
        markup=markup,
        written=None if started.template is None else WrittenAnswers(started.template, markup),
        names=tuple(dict.fromkeys((name, engine_config.model))),
        api_keys=config.api_keys,
        limits=config.limits,
        room=WaitingRoom(Promise(engine_config.min_tps_per_user, engine_config.max_ttft), config.queue),
    )


async def serve(
    engine_config: EngineConfig,
    config: ServeConfig,
    progress: Callable[[LoadProgress], None] | None = None,
    on_ready: Callable[[EngineReady, str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; `on_ready` gets the engine's facts and the address when requests are
    taken.

    The first signal drains: readiness turns 503, new requests are refused, running ones get
    `shutdown_timeout` seconds. A second one ends everything at once. Raises OSError when the address can't be
    had, before any model is loaded; where the engine is several ranks EngineDied when it dies, once clients
    have their errors: whoever started the ranks starts them again.
    """
    with _bound_socket(config.host, config.port) as sock:
        state = await start_state(engine_config, config, progress)
        try:
            server = _Server(
                uvicorn.Config(
                    build_app(state, config.cors_origins),
                    http=DirectProtocol,
                    log_level=config.log_level,
                    access_log=False,
                    lifespan="off",
                    timeout_graceful_shutdown=_GRACE_S,
                )
            )
            _drain_on_signals(state, server, config.shutdown_timeout)
            # What the start left stays. A full collection over it would hold every stream up for 20 to 50 ms.
            gc.collect()
            gc.freeze()
            if on_ready is not None and state.engine.ready is not None:
                sock.listen(_BACKLOG)
                host, port = sock.getsockname()[:2]
                on_ready(state.engine.ready, f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
            leaving = asyncio.create_task(_leave_with_ranks(state, server, engine_config.world))
            await server.serve(sockets=[sock])
            leaving.cancel()
            if leaving.done() and engine_config.world > 1 and not state.draining:
                raise EngineDied(state.engine.failure or "the engine ended")
        finally:
            gc.unfreeze()
            await state.engine.close()


class _Server(uvicorn.Server):
    """Uvicorn with its own signal handling off: the first signal must not close the door before requests are
    drained."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"can't listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return sock


def _drain_on_signals(state: ServerState, server: uvicorn.Server, timeout: float) -> None:
    loop = asyncio.get_running_loop()
    draining: list[asyncio.Task[None]] = []

    def on_signal() -> None:
        if draining:
            log.warning("second signal: ending now")
            server.force_exit = server.should_exit = True
            return
        state.draining = True
        draining.append(loop.create_task(_drain(state, server, timeout)))

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)


async def _leave_with_ranks(state: ServerState, server: uvicorn.Server, world: int) -> None:
    """Close the door when the engine has ended, if it was several ranks."""
    if world > 1:
        await state.engine.wait_for_end()
        server.should_exit = True


async def _drain(state: ServerState, server: uvicorn.Server, timeout: float) -> None:
    log.info("shutting down: %d requests have up to %g s to finish", state.active, timeout)
    deadline = asyncio.get_running_loop().time() + timeout
    while state.active and asyncio.get_running_loop().time() < deadline and not server.should_exit:
        await asyncio.sleep(_POLL_S)
    if state.active:
        log.warning("%d requests did not finish in time", state.active)
        await state.engine.close()
    server.should_exit = True
