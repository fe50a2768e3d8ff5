"""One measured run against a server: look at it, warm it up, hold the sessions, watch the client."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quickturn.bench.agent.asking import Asking, ask
from quickturn.bench.agent.ceiling import PrefixTree
from quickturn.bench.agent.http import Connection, Target
from quickturn.bench.agent.records import Record
from quickturn.bench.agent.run import Floor, Pace, Run, hold
from quickturn.bench.agent.sessions import Piece, Session, Turn
from quickturn.bench.agent.talk import ChatTalk, Talk, TokenTalk
from quickturn.bench.agent.watch import watched
from quickturn.bench.agent.wire import Clock, ConnectionFault

Api = Literal["chat", "ids"]

ASSUMED_TOKENS_PER_WORD = 1.2
_PROBES = (64, 192)
_PROBE_ANSWER = 8


@dataclass(frozen=True)
class Server:
    """The server to measure. `api`: messages, or prompts as token ids from `ids[0]` up to `ids[1]`."""

    url: str
    model: str = ""
    key: str = ""
    api: Api = "chat"
    ids: tuple[int, int] = (1000, 30000)


@dataclass
class Measured:
    """A run and what was found around it."""

    run: Run
    server: dict[str, Any]
    client: dict[str, Any]
    warm_up: dict[str, Any]


@dataclass
class _Found:
    """What the probes showed."""

    asking: Asking
    tokens_per_word: float = ASSUMED_TOKENS_PER_WORD
    counted: bool = False
    probes: list[Record] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For the result file: warm-up requests are here, and in no figure."""
        return {
            "requests": len(self.probes),
            "first_token_ms": [round((probe.first_token or 0.0) * 1e3, 1) for probe in self.probes],
            "exact_lengths": self.asking.exact,
            "tokens_per_word": round(self.tokens_per_word, 4),
            "tokens_per_word_measured": self.counted,
        }


async def measure(
    server: Server,
    sessions: Sequence[Session],
    pace: Pace,
    *,
    timeout: float = 600.0,
    temperature: float = 0.0,
    warm_ups: int = 2,
    now: Clock = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Measure `sessions` at `pace`. Raises ValueError, saying what to change, when the server can't be
    reached or refuses the first requests; what goes wrong later is counted in the run.
    """
    target = Target.of(server.url)

    def connect() -> Connection:
        return Connection(target, now, server.key)

    models = await _models(connect(), server.url)
    asking = Asking(server.model or _first(models), temperature=temperature, timeout=timeout)
    found = await _probe(connect(), asking, server, warm_ups, now)
    seen = PrefixTree()
    talks: list[Talk] = [_talk(server, session, seen, found.tokens_per_word) for session in sessions]
    async with watched(now) as watch:
        floor = Floor(connect, replace(found.asking, began=now()), pace, now, asyncio.sleep, progress)
        run = await hold(floor, sessions, talks)
    facts = {"url": server.url, "model": asking.model, "api": server.api, "models": models}
    return Measured(run, facts, watch.report(), found.facts())


async def _models(connection: Connection, url: str) -> Any:
    """The server's answer to /models; None where it has none. Raises ValueError when it can't be reached."""
    try:
        async with asyncio.timeout(30):
            status, body = await connection.get("/models")
    except (ConnectionFault, TimeoutError) as error:
        raise ValueError(f"no server answers at {url}: {error}; start one, or name another --url") from error
    finally:
        connection.close()
    if status in (401, 403):
        raise ValueError(f"the server at {url} wants a key: give --api-key")
    try:
        return json.loads(body) if status == 200 else None
    except ValueError:
        return None


def _first(models: Any) -> str:
    try:
        return str(models["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise ValueError("the server names no model: give --model") from None


async def _probe(connection: Connection, asking: Asking, server: Server, warm_ups: int, now: Clock) -> _Found:
    """Short requests: whether exact lengths can be asked for, and how many tokens a word has."""
    found = _Found(asking)
    counts = []
    try:
        for number in range(max(len(_PROBES), warm_ups)):
            length = _PROBES[number % len(_PROBES)]
            record = await _probe_once(connection, found, server, length, now)
            found.probes.append(record)
            counts.append(record.prompt)
    finally:
        connection.close()
    short, long = counts[:2]
    if server.api == "chat" and short is not None and long is not None and long > short:
        found.tokens_per_word = (long - short) / (_PROBES[1] - _PROBES[0])
        found.counted = True
    return found


async def _probe_once(
    connection: Connection, found: _Found, server: Server, length: int, now: Clock
) -> Record:
    session = Session("warm-up", (Turn(-1, 0, (Piece(f"warm-up/{length}", length),), _PROBE_ANSWER),))
    for _ in range(2):
        talk = _talk(server, session, PrefixTree(), 1.0)
        record, _ = await ask(connection, found.asking, talk, session.name, 0, _PROBE_ANSWER, now)
        if record.error in ("http 400", "http 422") and found.asking.exact:
            # A server that refuses fields that it doesn't know: lengths are then as the model ends them.
            found.asking = replace(found.asking, exact=False)
            continue
        break
    if record.error not in ("", "empty"):
        raise ValueError(f"the server refused the first request: {record.error}: {record.detail}")
    return record


def _talk(server: Server, session: Session, seen: PrefixTree, tokens_per_word: float) -> Talk:
    if server.api == "ids":
        return TokenTalk(session, seen, *server.ids)
    return ChatTalk(session, seen, tokens_per_word)
