"""The asyncio side of an engine process: start it, send requests, stream what comes back, and notice at once
when it dies."""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from quickturn.config import EngineConfig
from quickturn.engine.endings import how_it_ended
from quickturn.engine.journal import Journal
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
    LoadProgress,
    PromptScores,
    Shutdown,
    StepOutput,
    ToEngine,
    TokenOutput,
    decode_from_engine,
    encode,
)
from quickturn.engine.process import DEFAULT_CORE, Launch
from quickturn.engine.stream import EngineDied, RequestStream
from quickturn.openmp import with_short_spins
from quickturn.sampling_params import Constraint, SamplingParams

_LAST_WORDS_S = 0.2
_SHUTDOWN_S = 5.0
_HEARTBEAT_S = 5.0
_TURN_S = 0.002
"""How long messages that have piled up are read before others get a turn: what they bring a stream in that
time is written at once."""

log = logging.getLogger("quickturn.client")


class EngineClient:
    """Owns one engine process. Use from one event loop: `start`, then `submit` as often as needed, `close` at
    the end."""

    def __init__(self, config: EngineConfig, core: str = DEFAULT_CORE, log_level: str = "INFO") -> None:
        self.config = config
        self.failure: str | None = None
        """Why the engine can't serve any more; None while it can."""
        self.ready: EngineReady | None = None
        self.last_stats: EngineStats = EngineStats({})
        self.journal = Journal()
        self._launch = (core, log_level)
        self._streams: dict[int, RequestStream] = {}
        self._next_id = 0
        self._checks: dict[int, asyncio.Future[str]] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._on_progress: Callable[[LoadProgress], None] | None = None
        self._asked_at: float | None = None
        self._closing: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, progress: Callable[[LoadProgress], None] | None = None) -> EngineReady:
        """Start the process and wait until it serves; `progress` is called as the start proceeds.

        Raises EngineDied with the engine's own message when it can't start, OSError when the system gives no
        process or no socket. Nothing is left behind then.
        """
        loop = asyncio.get_running_loop()
        self._on_progress = progress
        self._started: asyncio.Future[EngineReady] = loop.create_future()
        self._exited = asyncio.Event()
        self._folder = Path(tempfile.mkdtemp(prefix="quickturn-"))
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        try:
            endpoint = self._bind()
            self._process = _spawn(Launch(endpoint, self._launch[0], self.config, self._launch[1]))
            threading.Thread(target=self._watch, args=(self._process, loop), daemon=True).start()
            self._tasks |= {
                loop.create_task(self._listen(self._process)),
                loop.create_task(self._end_with_process(self._process)),
            }
            self.ready = await self._started
        except BaseException:
            await self.close()
            raise
        self._tasks.add(loop.create_task(self._heartbeat()))
        return self.ready

    @property
    def pid(self) -> int:
        """The engine's process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    async def wait_for_end(self) -> None:
        """Return when the process has ended."""
        await self._exited.wait()

    @property
    def open_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._streams)

    @property
    def silent_for(self) -> float:
        """Seconds for which the engine has owed an answer; 0 when it owes none."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def submit(
        self,
        tokens: bytes,
        sampling: SamplingParams,
        *,
        priority: int = 0,
        session: str = "",
        cache_salt: str = "",
        deadline: float | None = None,
        retention: float = 0.0,
        boundaries: tuple[int, ...] = (),
    ) -> RequestStream:
        """Start a request over `tokens` (int32 little-endian). Raises EngineDied when there is no engine to
        take it."""
        if self.failure is not None:
            raise EngineDied(self.failure)
        self._next_id += 1
        stream = RequestStream(self._cancel, self._next_id)
        self._send(
            AddRequest(
                id=stream.id,
                tokens=tokens,
                sampling=sampling,
                arrival=time.monotonic(),
                priority=priority,
                session=session,
                cache_salt=cache_salt,
                deadline=deadline,
                retention=retention,
                boundaries=boundaries,
            )
        )
        self._streams[stream.id] = stream
        self.journal.submitted(stream.id, len(tokens) // 4, session)
        return stream

    def hold(self, session: str, seconds: float) -> None:
        """Keep the session's cache warm while its tool runs: its next request is on the way."""
        if self.failure is None:
            self._send(HoldSession(session, seconds))

    async def check(self, constraint: Constraint) -> str:
        """Have the engine compile a constraint; returns '' or why it can't be used. Raises EngineDied."""
        if self.failure is not None:
            raise EngineDied(self.failure)
        self._next_id += 1
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checks[self._next_id] = answer
        self._send(CheckConstraint(self._next_id, constraint))
        return await answer

    async def stats(self, timeout: float = 1.0) -> EngineStats:
        """The engine's counters; the last known ones when it doesn't answer in `timeout` seconds (a long
        step, a dead engine)."""
        if self.failure is None:
            waiter = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            self._ask()
            await asyncio.wait({waiter}, timeout=timeout)
            if not waiter.done():
                self._stats_waiters.remove(waiter)
        return self.last_stats

    async def close(self) -> None:
        """End the process (killed if it doesn't leave within seconds), and every open request with it.

        Whoever calls it returns when all is gone, also when somebody else called first.
        """
        if not hasattr(self, "_folder"):
            return
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._fail("the engine was shut down")
        if self._process is not None:
            await self._end_process(self._process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_process(self, process: "subprocess.Popen[bytes]") -> None:
        self._send(Shutdown())
        try:
            await asyncio.wait_for(self._exited.wait(), _SHUTDOWN_S if self.ready is not None else 0.0)
        except TimeoutError:
            process.kill()
            await self._exited.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _bind(self) -> str:
        endpoint = f"ipc://{self._folder}/engine"
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.set(option, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            why = f"can't open the socket {self._folder}/engine ({error}); set TMPDIR to another folder"
            raise OSError(why) from error
        return endpoint

    def _send(self, message: ToEngine) -> None:
        # With no high-water mark a send never waits, so its future needs no one to await it.
        self._socket.send(encode(message))

    def _cancel(self, request_id: int, finished: bool) -> None:
        self._streams.pop(request_id, None)
        self.journal.over(request_id, "stop" if finished else "cancelled")
        if self.failure is None:
            self._send(CancelRequest(request_id, finished))

    def _ask(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._send(AskStats())

    async def _heartbeat(self) -> None:
        while self.failure is None:
            await asyncio.sleep(_HEARTBEAT_S)
            self._ask()

    async def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            began = time.monotonic()
            while True:
                self._take(decode_from_engine(await self._socket.recv()))
                # A message that is already there doesn't make `recv` wait: without this turn for the others,
                # an engine that is faster than this process would keep everybody else from running at all.
                if time.monotonic() - began > _TURN_S:
                    await asyncio.sleep(0)
                    began = time.monotonic()
        except Exception as error:
            log.exception("the engine can't be listened to any more")
            self._fail(f"the engine's answers can't be taken: {error!r}")
            process.kill()

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            now = time.monotonic()
            for output in message.outputs:
                self._deliver(output, now)
        elif isinstance(message, EngineStats):
            self._take_stats(message)
        elif isinstance(message, ConstraintChecked):
            answer = self._checks.pop(message.id, None)
            if answer is not None and not answer.done():
                answer.set_result(message.error)
        elif isinstance(message, LoadProgress):
            if self._on_progress is not None:
                self._on_progress(message)
        elif isinstance(message, EngineFailed):
            self._fail(message.message)
        elif isinstance(message, PromptScores):
            if message.id in self._streams:
                self._streams[message.id].put_scores(message)
        elif isinstance(message, Admitted):
            for request_id in message.ids:
                if request_id in self._streams:
                    self._streams[request_id].admit()
        elif not self._started.done():
            self._started.set_result(message)

    def _deliver(self, output: TokenOutput, now: float) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return
        self.journal.delivered(output, now)
        if output.finish:
            del self._streams[output.id]
        stream.put(output)

    def _take_stats(self, stats: EngineStats) -> None:
        self.last_stats = stats
        self._asked_at = None
        for waiter in self._stats_waiters:
            if not waiter.done():
                waiter.set_result(stats)
        self._stats_waiters.clear()

    def _fail(self, message: str) -> None:
        if self.failure is not None:
            return
        self.failure = message
        if self.ready is not None and self._closing is None:
            log.error("%s; %d open requests end with an error", message, len(self._streams))
        for stream in self._streams.values():
            stream.fail(message)
            self.journal.over(stream.id, "error")
        self._streams.clear()
        for answer in self._checks.values():
            if not answer.done():
                answer.set_exception(EngineDied(message))
        self._checks.clear()
        if not self._started.done():
            self._started.set_exception(EngineDied(message))

    def _watch(self, process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop) -> None:
        process.wait()
        try:
            loop.call_soon_threadsafe(self._exited.set)
        except RuntimeError:
            log.debug("the event loop was closed before the engine ended")

    async def _end_with_process(self, process: "subprocess.Popen[bytes]") -> None:
        await self._exited.wait()
        if self.failure is None:
            # A process that leaves by itself says why first; its message may still be in the socket.
            await asyncio.sleep(_LAST_WORDS_S)
        self._fail(f"the engine process ended unexpectedly ({how_it_ended(process.returncode)})")


def _spawn(launch: Launch) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "quickturn.engine.process"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, env=with_short_spins(os.environ))
    assert process.stdin is not None
    # A process that is gone already is noticed, and reaped, by the thread that watches it.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
    return process
