"""The engine process: an `EngineCore` behind a ZeroMQ socket, started by `EngineClient` and ended with it.

The parent writes one line of JSON (`Launch`) to this process's standard input and keeps the pipe open. The
pipe's end means that the parent is gone, however it went, and ends this process.
"""

import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from quickturn.config import EngineConfig
from quickturn.engine.crew import Crew, RankLost
from quickturn.engine.join import gather
from quickturn.engine.messages import (
    AddRequest,
    Admitted,
    AskStats,
    CancelRequest,
    CheckConstraint,
    ConstraintChecked,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    HoldSession,
    PromptScores,
    Shutdown,
    StepOutput,
    TokenOutput,
    decode_to_engine,
    encode,
)

DEFAULT_CORE = "quickturn.engine.core:EngineCore"
_SEVERAL_RANKS = "quickturn.engine.leader:Leader"
_LINGER_MS = 1000

log = logging.getLogger("quickturn.engine")


class Core(Protocol):
    """What the loop needs of an engine core; built as `Core(config, progress=callable)`."""

    def ready(self) -> EngineReady:
        """The facts of the started engine."""

    def add(self, request: AddRequest) -> None:
        """Take a request; ValueError refuses it."""

    def cancel(self, request: CancelRequest) -> None:
        """Stop a request; unknown ids are ignored."""

    def hold(self, request: HoldSession) -> None:
        """Keep a session's cache warm."""

    def check(self, request: CheckConstraint) -> None:
        """Begin to compile a constraint."""

    def checked(self) -> list[ConstraintChecked]:
        """The constraints that were asked for and are decided now."""

    def announce(self, tell: Callable[[Admitted], None]) -> None:
        """Have `tell` called when requests get a place."""

    def news(self) -> Sequence[PromptScores]:
        """What is to be heard before the outputs of the last step."""

    def has_work(self) -> bool:
        """Whether `step` would get on with something."""

    def step(self) -> StepOutput:
        """Run one step."""

    def stats(self) -> EngineStats:
        """Counters and gauges."""

    def close(self) -> None:
        """Give everything back."""


class Launch(msgspec.Struct, frozen=True):
    """All that a new engine process is told: where to report, which core to run (`module:class`), and its
    configuration."""

    endpoint: str
    core: str
    config: EngineConfig
    log_level: str = "INFO"


class Loop:
    """Answers messages between steps, runs steps while there is work, and sleeps in the socket when there is
    none."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """Queue `message` for the parent. Loaders report progress from their own threads, hence the lock."""
        with self._sending:
            self._socket.send(encode(message))

    def run(self, core: Core, crew: Crew | None = None) -> None:
        """Serve until told to shut down. Whatever a step raises ends the loop, as the failure of another rank
        does.
        """
        idle = zmq.Poller()
        idle.register(self._socket, zmq.POLLIN)
        if crew is not None:
            idle.register(crew.alarm, zmq.POLLIN)
        while True:
            if not core.has_work():
                idle.poll()
                if crew is not None:
                    crew.check()
            while self._socket.poll(0):
                message = decode_to_engine(self._socket.recv())
                if isinstance(message, Shutdown):
                    return
                self._handle(core, message)
            if core.has_work():
                output = core.step()
                for news in core.news():
                    self.send(news)
                if output.outputs:
                    self.send(output)
            for checked in core.checked():
                self.send(checked)

    def _handle(
        self, core: Core, message: AddRequest | CancelRequest | HoldSession | CheckConstraint | AskStats
    ) -> None:
        if isinstance(message, AddRequest):
            try:
                core.add(message)
            except (ValueError, TypeError, OverflowError) as error:
                if not isinstance(error, ValueError):
                    log.exception("a request that should have been refused earlier")
                self.send(StepOutput([TokenOutput(message.id, [], finish="error", error=str(error))]))
        elif isinstance(message, CancelRequest):
            core.cancel(message)
        elif isinstance(message, HoldSession):
            core.hold(message)
        elif isinstance(message, CheckConstraint):
            core.check(message)
        else:
            self.send(core.stats())


def load_core(path: str) -> Callable[..., Core]:
    """The class that `module:class` names."""
    module, _, name = path.partition(":")
    core: Any = getattr(importlib.import_module(module), name)
    return core  # type: ignore[no-any-return]


def serve(launch: Launch, socket: "zmq.Socket[bytes]") -> int:
    """Build the core, report, run. Returns the process's exit status."""
    loop = Loop(socket)
    crew: Crew | None = None
    try:
        if launch.config.world > 1:
            crew = gather(launch.config, launch.log_level)
            crew.on_stuck = partial(_end_stuck, loop)
        core = _build(launch, loop, crew)
        core.announce(loop.send)
        loop.send(core.ready())
        gc.collect()
        gc.freeze()
        loop.run(core, crew)
        core.close()
        gc.unfreeze()
    except Exception as error:
        loop.send(EngineFailed(_message(error)))
        return 1
    finally:
        if crew is not None:
            crew.report()
            crew.close()
    return 0


def _build(launch: Launch, loop: Loop, crew: Crew | None) -> Core:
    if crew is None:
        return load_core(launch.core)(launch.config, progress=loop.send)
    name = _SEVERAL_RANKS if launch.core == DEFAULT_CORE else launch.core
    return load_core(name)(launch.config, progress=loop.send, crew=crew)


def _end_stuck(loop: Loop, why: str) -> None:
    """Called in a thread when the main one waits for ranks that are gone: nobody else will say so."""
    loop.send(EngineFailed(why))
    time.sleep(_LINGER_MS / 1000)
    os._exit(1)


def _message(error: Exception) -> str:
    """What the user should read; a stack in the log only for faults that a user can't mend."""
    if isinstance(error, ValueError | OSError | MemoryError | RankLost) and str(error):
        log.debug("the engine stops", exc_info=error)
        return str(error)
    log.error("the engine stops", exc_info=error)
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Entry of the process."""
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    threading.Thread(target=_end_with_parent, args=(launch.endpoint,), daemon=True).start()
    # Signals of a terminal or a supervisor reach every process of the group; the parent decides when to
    # leave.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.basicConfig(
        level=launch.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.connect(launch.endpoint)
    status = serve(launch, socket)
    socket.close()
    context.term()
    if launch.config.world > 1:
        sys.stderr.flush()
        # Threads of collectives that wait for a rank that is gone would keep the interpreter from ending.
        os._exit(status)
    sys.exit(status)


def _end_with_parent(endpoint: str) -> None:
    # Not sys.stdin: its lock, held by a waiting daemon thread, would abort the interpreter's normal exit.
    while os.read(0, 1):
        pass
    # The parent would have removed its socket and the folder around it.
    socket = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        socket.unlink()
        socket.parent.rmdir()
    os._exit(1)


if __name__ == "__main__":
    main()
