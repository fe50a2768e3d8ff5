"""Recorded sessions: the per-session format with 64-token ids, and Mooncake's lines with 512-token ids.

Both say of a prompt how long it is and which blocks it begins with, not what it says. How a turn grew out of
an earlier one follows from the blocks that they share.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickturn.bench.agent.sessions import Piece, Session, Turn

UNIT = 64
MOONCAKE_UNIT = 512


@dataclass(frozen=True)
class Recorded:
    """One recorded request: tokens of prompt and answer, ids of the prompt's blocks, seconds before it."""

    prompt: int
    answer: int
    ids: tuple[int, ...]
    think: float = 0.0


def read(path: Path) -> list[Session]:
    """Sessions of a trace file, of a folder of `trace_*.json`, or of a Mooncake `.jsonl` file.

    Raises ValueError, naming the file and what is wrong in it.
    """
    if path.is_dir():
        files = sorted(path.glob("trace_*.json"))
        if not files:
            raise ValueError(f"{path} has no trace_*.json: name a folder of recorded sessions, or a file")
        return [session for file in files for session in read(file)]
    try:
        if path.suffix == ".jsonl":
            return mooncake_sessions(_lines(path))
        trace = json.loads(path.read_text())
        unit = int(trace.get("block_size", UNIT))
        return [session_of(path.stem, list(flatten(trace["requests"])), unit)]
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no recorded session: {type(error).__name__}: {error}") from error


def flatten(requests: Iterable[dict[str, Any]]) -> Iterator[Recorded]:
    """Requests in order; those of a subagent stand in for it."""
    for request in requests:
        if request["type"] == "subagent":
            yield from flatten(request["requests"])
        else:
            yield Recorded(
                int(request["in"]),
                max(1, int(request["out"])),
                tuple(request["hash_ids"]),
                float(request.get("think_time") or 0.0),
            )


def session_of(name: str, requests: list[Recorded], unit: int = UNIT) -> Session:
    """The session of recorded requests, each grown out of the latest one that shares most blocks with it."""
    runs = _Runs()
    turns: list[Turn] = []
    for index, request in enumerate(requests):
        known, parent = runs.longest(request.ids)
        runs.add(request.ids, index)
        if parent < 0:
            pieces = _blocks(name, request, unit)
            turns.append(Turn(-1, 0, pieces, request.answer, request.think))
            continue
        keep = _kept(requests[parent], request, known, unit)
        fresh = Piece(f"{name}/turn{index}", request.prompt - keep)
        turns.append(Turn(parent, keep, (fresh,), request.answer, request.think))
    return Session(name, tuple(turns))


def ceiling(requests: Iterable[Recorded], unit: int = UNIT) -> int:
    """Prompt tokens that an infinite cache of prompts in blocks of `unit` would reuse, by the ids alone."""
    runs = _Runs()
    total = 0
    for index, request in enumerate(requests):
        known, _ = runs.longest(request.ids)
        runs.add(request.ids, index)
        total += min(known * unit, request.prompt - 1)
    return total


def mooncake_sessions(lines: Iterable[dict[str, Any]], unit: int = MOONCAKE_UNIT) -> list[Session]:
    """Sessions of Mooncake's requests (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`).

    The trace has no users. A request that extends the whole prompt of the latest turn of a session is that
    session's next turn; any other begins a session, whose first blocks may be those of others. What lies
    between two turns holds the answer, too: think times from it are bounds from above.
    """
    runs = _Runs()
    requests: list[Recorded] = []
    times: list[float] = []
    chains: list[list[int]] = []
    chain_of: dict[int, list[int]] = {}
    for index, line in enumerate(lines):
        request = Recorded(
            int(line["input_length"]), max(1, int(line["output_length"])), tuple(line["hash_ids"])
        )
        known, parent = runs.longest(request.ids)
        runs.add(request.ids, index)
        requests.append(request)
        times.append(float(line["timestamp"]) / 1e3)
        if (
            parent >= 0
            and chain_of[parent][-1] == parent
            and _extends(requests[parent], request, known, unit)
        ):
            chain = chain_of[parent]
        else:
            chain = []
            chains.append(chain)
        chain.append(index)
        chain_of[index] = chain
    sessions = []
    for number, chain in enumerate(chains):
        turns: list[Turn] = []
        for at, index in enumerate(chain):
            request = requests[index]
            if not at:
                turns.append(Turn(-1, 0, _blocks("mooncake", request, unit), request.answer))
                continue
            before = chain[at - 1]
            shared = min(len(requests[before].ids), len(request.ids))
            keep = _kept(requests[before], request, shared, unit)
            fresh = Piece(f"mooncake{number}/turn{at}", request.prompt - keep)
            think = max(0.0, times[index] - times[before])
            turns.append(Turn(at - 1, keep, (fresh,), request.answer, think))
        sessions.append(Session(f"mooncake{number}", tuple(turns)))
    return sessions


class _Runs:
    """Leading ids of all requests so far: which run is known, and whose it was last."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._latest: list[int] = [-1]

    def longest(self, ids: tuple[int, ...]) -> tuple[int, int]:
        """How many leading ids are known, and the latest request that had them; (0, -1) for none."""
        node = known = 0
        for id in ids:
            after = self._next.get((node, id))
            if after is None:
                break
            node, known = after, known + 1
        return known, self._latest[node] if known else -1

    def add(self, ids: tuple[int, ...], request: int) -> None:
        node = 0
        for id in ids:
            after = self._next.setdefault((node, id), len(self._latest))
            if after == len(self._latest):
                self._latest.append(request)
            self._latest[after] = request
            node = after


def _extends(before: Recorded, request: Recorded, known: int, unit: int) -> bool:
    """Whether `request` begins with the whole prompt of `before`, as far as whole blocks tell."""
    return request.prompt > before.prompt and known >= max(1, before.prompt // unit)


def _kept(before: Recorded, request: Recorded, known: int, unit: int) -> int:
    """Tokens that `request` keeps of the conversation after `before`, whose first `known` blocks it has.

    An answer is kept where there is room for it and one token more; where there isn't, it was rewritten (its
    thinking dropped, say) and counts as new.
    """
    if not _extends(before, request, known, unit):
        return min(known * unit, before.prompt, request.prompt - 1)
    whole = before.prompt + before.answer
    return whole if whole < request.prompt else before.prompt


def _blocks(scope: str, request: Recorded, unit: int) -> tuple[Piece, ...]:
    """A first prompt: its blocks by name, and a rest that has no id."""
    pieces = []
    left = request.prompt
    for id in request.ids:
        if left > 0:
            pieces.append(Piece(f"{scope}/{id}", min(unit, left)))
            left -= unit
    if left > 0:
        pieces.append(Piece(f"{scope}/rest/{request.ids[-1] if request.ids else ''}/{request.prompt}", left))
    return tuple(pieces)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        for line in file:
            if line.strip():
                yield json.loads(line)
