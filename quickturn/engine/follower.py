"""A rank that is not the first: it takes the steps that the first one orders, until it is told to leave.

Started by the first rank on the same machine, its standard input is the link on which it says how it gets on;
or it is joined from another machine. The link's end means that the first rank is gone, however it went, and
ends this process.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from typing import NoReturn

import msgspec

from quickturn.config import EngineConfig
from quickturn.engine.crew import WAITING, RankLaunch, cut_off, tell
from quickturn.engine.link import Link, LinkClosed
from quickturn.engine.lockstep import Agree, Alive, Batch, Failed, Go, Hello, Leave, pack, unpack
from quickturn.engine.messages import LoadProgress

_PR_SET_PDEATHSIG = 1

log = logging.getLogger("quickturn.ranks")


def follow(config: EngineConfig, rank: int, local: tuple[int, int], status: Link, steps: Link) -> int:
    """Be rank `rank`, which is `local` = (number, of how many) on its machine, until the end. Returns the
    process's exit status.
    """
    threading.Thread(target=_end_with_first, args=(status,), daemon=True, name="first rank").start()
    try:
        _work(config, rank, local, status, steps)
    except LinkClosed:
        return 1
    except Exception as error:
        log.debug("rank %d stops", rank, exc_info=error)
        mendable = isinstance(error, ValueError | OSError | MemoryError) and str(error)
        if not mendable and not cut_off(error):
            log.error("rank %d stops", rank, exc_info=error)
        text = str(error) if mendable else f"{type(error).__name__}: {error}"
        tell(status, Failed(text, follows=cut_off(error)))
        return 1
    return 0


def _work(config: EngineConfig, rank: int, local: tuple[int, int], status: Link, steps: Link) -> None:
    # Not before the first rank's process can be watched: torch takes seconds to import.
    from quickturn.engine.core import EngineCore
    from quickturn.engine.ranked import RankedCore
    from quickturn.engine.seat import close_process_group, join_store, open_seat

    def agree(value: int) -> int:
        steps.send(pack(Agree(value)))
        tell(status, Alive(WAITING))
        answer = unpack(steps.recv())
        assert isinstance(answer, Agree)
        tell(status, Alive("starting"))
        return answer.value

    def progress(report: LoadProgress) -> None:
        tell(status, Alive(report.stage))

    tell(status, Alive(WAITING))
    hello = unpack(steps.recv())
    assert isinstance(hello, Hello)
    tell(status, Alive("joining the others"))
    store = join_store(hello.store_host, hello.store_port, config.world, config.rank_timeout)
    seat = open_seat(config, store, rank, local, hello.hash_key, agree)
    ranked = RankedCore(EngineCore(config, progress, seat), seat)
    agree(0)
    gc.collect()
    gc.freeze()
    leads = seat.mesh.dp > 1 and rank % seat.mesh.attention_span == 0
    tell(status, Alive(WAITING))
    while not isinstance(said := unpack(steps.recv()), Leave):
        assert isinstance(said, Batch), said
        report = ranked.plan(said)
        if leads:
            steps.send(pack(report))
        go = unpack(steps.recv())
        assert isinstance(go, Go), go
        ranked.run(go)
    ranked.core.close()
    close_process_group()


def _end_with_first(status: Link) -> NoReturn:
    status.wait_for_end()
    os._exit(1)


def _die_with_parent() -> None:
    """Have the system kill this process with the one that started it, whatever this one is doing then."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ignore_signals() -> None:
    """Signals of a terminal or a supervisor reach every process of the group; the first rank decides when to
    leave.
    """
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)


def main() -> None:
    """Entry of a rank on the first one's machine."""
    ignore_signals()
    status = Link(socket.socket(fileno=os.dup(0)))
    try:
        launch = msgspec.json.decode(status.recv(), type=RankLaunch)
    except LinkClosed:
        sys.exit(1)
    if launch.bound:
        _die_with_parent()
    logging.basicConfig(
        level=launch.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    steps = Link(socket.socket(fileno=launch.steps))
    status_code = follow(launch.config, launch.rank, (launch.rank, launch.config.world), status, steps)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of collectives that wait for a rank that is gone would keep the interpreter from ending.
    os._exit(status_code)


if __name__ == "__main__":
    main()
