"""The other ranks as the first one sees them: processes to start, to watch and to end.

Each is held by two links. On one it says how it gets on, and its end tells at once when the process is gone;
a thread listens there. On the other the ranks take their steps, main thread to main thread.

When a rank fails, is gone or hangs, all of them end. Who is to blame is decided a moment after the first
sign: a rank that was cut off from another says so sooner than the system says that the other was killed.
"""

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from quickturn.config import EngineConfig
from quickturn.engine.endings import how_it_ended
from quickturn.engine.link import Link, LinkClosed
from quickturn.engine.lockstep import Alive, Failed, pack, unpack
from quickturn.openmp import with_short_spins

_LISTEN_S = 0.25
"""How long signs of trouble are collected before somebody is blamed."""
_TICK_S = 1.0
_LEAVE_S = 2.0
_BLAMED_IN_S = 2.0
_STUCK_S = 1.0
"""How long the main thread gets to report a failure itself."""

_COLLECTIVES = ("gloo", "Gloo", "NCCL", "TCPStore", "Connection closed by peer", "Connection reset by peer")

FOLLOWER = ("-m", "quickturn.engine.follower")
"""What the interpreter of another rank runs."""

WAITING = ""
"""The stage of a rank that waits for others."""

log = logging.getLogger("quickturn.ranks")


class RankLost(RuntimeError):
    """A rank is gone, failed or hangs; the text says which, and why."""


class RankLaunch(msgspec.Struct, frozen=True):
    """All that a new rank on this machine is told. `steps`: the file descriptor of its second link. `bound`:
    it ends with the thread that started it, even if it can't do so itself.
    """

    config: EngineConfig
    rank: int
    steps: int
    log_level: str
    bound: bool


@dataclass
class Member:
    """One of the other ranks. `process` is None for one that somebody else started."""

    rank: int
    where: str
    status: Link
    steps: Link
    process: "subprocess.Popen[bytes] | None" = None
    first_host: str = "127.0.0.1"
    """Where this rank finds the first one."""
    local: bool = True
    """Whether it is on the first one's machine."""
    stage: str = "starting"
    heard: float = field(default_factory=time.monotonic)
    failed: Failed | None = None
    gone: bool = False

    def trouble(self) -> str:
        """What became of it; waits a moment for the system to say."""
        if self.failed is not None:
            return f"rank {self.rank} ({self.where}) failed: {self.failed.message}"
        if self.process is None:
            return f"the connection to rank {self.rank} ({self.where}) broke: its process or machine is gone"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STUCK_S)
        return f"rank {self.rank} ({self.where}) ended unexpectedly ({how_it_ended(self.process.returncode)})"


class Crew:
    """Members by rank, from rank 1 on, and a thread that watches them until `close`."""

    def __init__(self, members: Sequence[Member], timeout: float) -> None:
        """`timeout`: seconds without progress after which a rank hangs."""
        self.members = tuple(members)
        self.failure: str | None = None
        """Why the ranks can't go on; None while they can."""
        self.on_stuck: Callable[[str], None] | None = None
        """Called with the failure when the main thread doesn't `report` it in time: it waits for ranks that
        are gone."""
        self.on_failed: Callable[[], None] = lambda: None
        """Called when there is a failure: what the device waits for must break off as well."""
        self._timeout = timeout
        self._stage = "starting"
        self._since = time.monotonic()
        self._failed = threading.Event()
        self._reported = threading.Event()
        self._leaving = False
        self._alarm, self._bell = os.pipe()
        self._end, self._ender = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="ranks")
        self._thread.start()

    @property
    def alarm(self) -> int:
        """A file descriptor that becomes readable when there is a failure."""
        return self._alarm

    def alive(self, stage: str) -> None:
        """The first rank gets on with its own start, or waits (WAITING)."""
        self._stage, self._since = stage, time.monotonic()

    @contextlib.contextmanager
    def together(self, stage: str) -> Iterator[None]:
        """Within the block, ranks may have to wait for each other, but not for ever. Errors of links and of
        collectives become RankLost where a rank is to blame.
        """
        self.alive(stage)
        try:
            yield
        except Exception as error:
            raise self.explained(error) from error
        self.alive(WAITING)

    def explained(self, error: Exception) -> Exception:
        """The error, or RankLost if it came of what happened to a rank."""
        if isinstance(error, RankLost):
            return error
        # A rank's end breaks connections here before the thread has heard of it.
        self._failed.wait(_BLAMED_IN_S if cut_off(error) else 0.0)
        return error if self.failure is None else RankLost(self.failure)

    def check(self) -> None:
        """Raises RankLost if there is a failure."""
        if self.failure is not None:
            raise RankLost(self.failure)

    def report(self) -> None:
        """The main thread has taken the failure over."""
        self._reported.set()

    def close(self) -> None:
        """Let everybody go; whoever doesn't leave in a moment is killed. Several calls are fine."""
        if self._leaving:
            return
        self._leaving = True
        self._reported.set()
        os.write(self._ender, b"x")
        self._thread.join()
        for member in self.members:
            member.steps.close()
            member.status.close()
        deadline = time.monotonic() + _LEAVE_S
        for member in self.members:
            if member.process is not None:
                try:
                    member.process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    member.process.kill()
                    member.process.wait()
        for descriptor in (self._alarm, self._bell, self._end, self._ender):
            os.close(descriptor)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            for member in self.members:
                selector.register(member.status, selectors.EVENT_READ, member)
            verdict: float | None = None
            while not self._leaving:
                for key, _ in selector.select(_TICK_S if verdict is None else _LISTEN_S / 4):
                    if key.data is not None and not self._listen(key.data):
                        selector.unregister(key.fileobj)
                if self.failure is not None or self._leaving:
                    continue
                now = time.monotonic()
                if verdict is None and any(member.gone or member.failed for member in self.members):
                    verdict = now + _LISTEN_S
                if verdict is not None and now >= verdict:
                    self._fail(blame(self.members))
                elif hang := self._hang(now):
                    self._fail(hang)

    def _listen(self, member: Member) -> bool:
        """Take one message; False when there will be no more."""
        try:
            said = unpack(member.status.recv())
        except LinkClosed:
            member.gone = True
            return False
        member.heard = time.monotonic()
        if isinstance(said, Alive):
            member.stage = said.stage
        elif isinstance(said, Failed):
            member.failed = said
        return True

    def _hang(self, now: float) -> str:
        """Which rank hangs, if any does."""
        for member in self.members:
            if member.stage != WAITING and now - member.heard > self._timeout:
                return (
                    f"rank {member.rank} ({member.where}) hangs: it has not got on with {member.stage!r} for"
                    f" {self._timeout:g} s"
                )
        if self._stage != WAITING and now - self._since > self._timeout:
            return (
                f"the ranks hang: the first one has not got on with {self._stage!r} for {self._timeout:g} s;"
                " see --rank-timeout"
            )
        return ""

    def _fail(self, why: str) -> None:
        self.failure = why
        log.error("%s", why)
        self._failed.set()
        os.write(self._bell, b"x")
        # Whatever the main thread waits for breaks off.
        for member in self.members:
            member.steps.shut()
            if member.process is not None:
                member.process.kill()
        with contextlib.suppress(RuntimeError, ValueError):
            self.on_failed()
        if not self._reported.wait(_STUCK_S) and self.on_stuck is not None:
            self.on_stuck(why)


def blame(members: Sequence[Member]) -> str:
    """What happened, of the rank that is most likely where it began. At least one is gone or has failed."""
    lost = [member for member in members if member.gone or member.failed is not None]
    first = min(lost, key=lambda member: (member.failed is not None and member.failed.follows, member.rank))
    return first.trouble()


def cut_off(error: Exception) -> bool:
    """Whether an error came of another rank's end: links and torch's collectives say so."""
    return isinstance(error, ConnectionError) or any(word in str(error) for word in _COLLECTIVES)


def spawn(config: EngineConfig, log_level: str, bound: bool) -> Crew:
    """Start the other ranks of `config` on this machine. `bound`: see `RankLaunch`. Raises OSError; nothing
    is left then.
    """
    members: list[Member] = []
    try:
        for rank in range(1, config.world):
            members.append(_start(RankLaunch(config, rank, -1, log_level, bound)))
    except BaseException:
        for member in members:
            if member.process is not None:
                member.process.kill()
                member.process.wait()
        raise
    return Crew(members, config.rank_timeout)


def _start(launch: RankLaunch) -> Member:
    status, its_status = socket.socketpair()
    steps, its_steps = socket.socketpair()
    with its_status, its_steps:
        process = subprocess.Popen(
            [sys.executable, *FOLLOWER],
            stdin=its_status.fileno(),
            pass_fds=[its_steps.fileno()],
            env=with_short_spins(os.environ),
        )
        launch = msgspec.structs.replace(launch, steps=its_steps.fileno())
    member = Member(launch.rank, f"process {process.pid}", Link(status), Link(steps), process)
    # One that is gone already is noticed by the thread that watches.
    with contextlib.suppress(LinkClosed):
        member.status.send(msgspec.json.encode(launch))
    return member


def tell(link: Link, message: Alive | Failed) -> None:
    """Say something to the first rank; it may be gone."""
    with contextlib.suppress(LinkClosed):
        link.send(pack(message))
