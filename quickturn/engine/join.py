"""Ranks that somebody else started, on one machine or on several: they find the first one, and it them.

A launcher such as torchrun starts a process for each rank and says in its environment which one it is. The
first one listens at MASTER_ADDR, on the port behind MASTER_PORT (which is the launcher's own).
"""

import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from quickturn.config import EngineConfig
from quickturn.engine.crew import Crew, Member, spawn
from quickturn.engine.link import Link, LinkClosed

_RETRY_S = 0.2
_CHANNELS = ("status", "steps")


class Joining(msgspec.Struct, frozen=True):
    """The first thing that a rank says on each of its two links. `options`: a digest of its configuration."""

    rank: int
    channel: str
    host: str
    process: int
    options: str


class Refused(msgspec.Struct, frozen=True):
    """The answer; an empty text welcomes."""

    why: str


@dataclass(frozen=True)
class Outside:
    """What the launcher said: this rank, of `world`, and its number among those of this machine."""

    rank: int
    world: int
    local_rank: int
    local_ranks: int
    host: str
    port: int


def outside(config: EngineConfig, environment: Mapping[str, str]) -> Outside | None:
    """Which rank this process is by its environment; None if nobody said. Raises ValueError where the number
    of processes isn't that of the mesh, or where to find the first one is missing.
    """
    if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world != config.world:
        raise ValueError(
            f"{world} processes were started (WORLD_SIZE), but the mesh has {config.world} ranks"
            f" (tp {config.tp} x dp {config.dp} x cp {config.cp}): give --tp, --dp and --cp whose product is"
            f" {world}, or start {config.world} processes"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ValueError(f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: use torchrun")
    return Outside(
        rank,
        world,
        int(environment.get("LOCAL_RANK", rank)),
        int(environment.get("LOCAL_WORLD_SIZE", world)),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]) + 1,
    )


def gather(config: EngineConfig, log_level: str) -> Crew:
    """The other ranks of `config`, for the first one: those of a launcher, else new processes. Raises
    ValueError, OSError or TimeoutError that say what to change.
    """
    place = outside(config, os.environ)
    if place is None:
        return spawn(config, log_level, bound=True)
    return Crew(_accept(config, place), config.rank_timeout)


def join(config: EngineConfig, place: Outside) -> tuple[Link, Link]:
    """This rank's links to the first one, which may come up later. Raises TimeoutError, and ValueError with
    its reason if it refuses.
    """
    deadline = time.monotonic() + config.rank_timeout
    status, steps = (_connect(config, place, channel, deadline) for channel in _CHANNELS)
    return status, steps


def _accept(config: EngineConfig, place: Outside) -> list[Member]:
    links: dict[tuple[int, str], Link] = {}
    said: dict[int, Joining] = {}
    wanted = [(rank, channel) for rank in range(1, config.world) for channel in _CHANNELS]
    deadline = time.monotonic() + config.rank_timeout
    with _listener(place) as listener:
        while missing := [key for key in wanted if key not in links]:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                sock, _ = listener.accept()
            except TimeoutError as error:
                ranks = sorted({rank for rank, _ in missing})
                raise TimeoutError(
                    f"ranks {', '.join(map(str, ranks))} did not come in {config.rank_timeout:g} s"
                ) from error
            link = Link(sock)
            try:
                joining = msgspec.msgpack.decode(link.recv(), type=Joining)
                why = _objection(config, joining, missing)
                link.send(msgspec.msgpack.encode(Refused(why)))
            except (LinkClosed, msgspec.DecodeError):
                link.close()
                continue
            if why:
                link.close()
                if "options" in why:
                    raise ValueError(f"rank {joining.rank} on {joining.host}: {why}")
                continue
            links[joining.rank, joining.channel] = link
            said[joining.rank] = joining
    return [
        Member(
            rank,
            f"process {each.process} on {each.host}",
            links[rank, "status"],
            links[rank, "steps"],
            first_host=place.host,
            local=each.host == platform.node(),
        )
        for rank, each in sorted(said.items())
    ]


def _listener(place: Outside) -> socket.socket:
    try:
        return socket.create_server(("", place.port), backlog=2 * place.world)
    except OSError as error:
        raise OSError(
            f"can't listen on port {place.port} for the other ranks ({error.strerror}): it is the one behind"
            " MASTER_PORT; choose another"
        ) from error


def _objection(config: EngineConfig, joining: Joining, missing: list[tuple[int, str]]) -> str:
    if joining.options != _digest(config):
        return "it was started with other options, or by another version; all ranks need the same"
    if (joining.rank, joining.channel) not in missing:
        return f"there is a rank {joining.rank} already, or shall be none"
    return ""


def _connect(config: EngineConfig, place: Outside, channel: str, deadline: float) -> Link:
    while True:
        try:
            sock = socket.create_connection((place.host, place.port), timeout=5)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the first rank was not found at {place.host}:{place.port} in {config.rank_timeout:g} s"
                    f" ({error})"
                ) from error
            time.sleep(_RETRY_S)
    link = Link(sock)
    me = Joining(place.rank, channel, platform.node(), os.getpid(), _digest(config))
    link.send(msgspec.msgpack.encode(me))
    answer = msgspec.msgpack.decode(link.recv(), type=Refused)
    if answer.why:
        raise ValueError(f"the first rank refuses rank {place.rank}: {answer.why}")
    return link


def _digest(config: EngineConfig) -> str:
    return hashlib.blake2b(msgspec.json.encode(config), digest_size=16).hexdigest()
