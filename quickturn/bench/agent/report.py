"""A run's result as JSON, and as a table to read."""

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quickturn import __version__
from quickturn.bench.agent.figures import figures, over_time
from quickturn.bench.agent.run import Run
from quickturn.bench.machine import commit, processor

KIND = "agent"
SECRETS = ("--api-key",)


def result(
    run: Run,
    *,
    label: str,
    gpus: int,
    promise: float,
    load: dict[str, Any],
    server: dict[str, Any],
    client: dict[str, Any],
    words: Sequence[str],
    warm_up: dict[str, Any],
) -> dict[str, Any]:
    """Everything about a run, ready for JSON. `words` are the command's; keys in it are left out."""
    return {
        "kind": KIND,
        "label": label,
        "gpus": gpus,
        "load": load,
        "figures": figures(run, gpus, promise),
        "client": client,
        "warm_up": warm_up,
        "server": server,
        "environment": environment(words),
        "over_time": over_time(run),
        "requests": [
            {
                "session": record.session,
                "turn": record.turn,
                "sent": round(record.sent, 4),
                "first": round(record.arrivals[0], 4) if record.arrivals else None,
                "done": round(record.done, 4),
                "prompt": record.prompt,
                "cached": record.cached,
                "ceiling": record.ceiling,
                "answer": record.answer,
                "finish": record.finish,
                **({"error": record.error} if record.error else {}),
            }
            for record in run.records
        ],
    }


def environment(words: Sequence[str]) -> dict[str, Any]:
    """What the client's figures depend on: machine, versions, the command, this code's commit."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "quickturn": __version__,
        "commit": commit(12),
        "command": " ".join(without_secrets(words)),
    }


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command, keys replaced."""
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        if kept and kept[-1] in SECRETS:
            kept.append("***")
        elif name in SECRETS and equals:
            kept.append(f"{name}=***")
        else:
            kept.append(word)
    return kept


def write(path: Path, found: dict[str, Any]) -> None:
    """Write JSON so that the file is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(found, separators=(",", ":")) + "\n")
    beside.replace(path)


def read(path: Path) -> dict[str, Any]:
    """A result file. Raises ValueError for anything else."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ValueError(f"{path} is no result of `quickturn bench agent`")
    return found


def lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values for a table."""
    got = found["figures"]
    load, cache, rates, full = found["load"], got["cache"], got["per_gpu"], got["full"]
    firsts = got["first_token_ms"]
    table = [
        ("users at a time, sessions", f"{load['concurrency']}, {load['sessions']}"),
        ("requests answered, seconds", f"{got['requests']}, {got['seconds']:.1f}"),
        ("tokens/s of a user: median (p10)", _of(got["user_tokens_per_second"], "median", "p10")),
        ("ms between arrivals: median / p90 / p99", _of(got["gap_ms"], "median", "p90", "p99")),
        ("tokens in an arrival", _number(got["tokens_per_arrival"])),
        ("ms to first token, first turn: median / p90", _of(firsts["first_turn"], "median", "p90")),
        ("ms to first token, later turns: median / p90", _of(firsts["later_turns"], "median", "p90")),
        ("answer tokens/s per GPU (all users at work)", f"{rates['answer']} ({full['per_gpu']['answer']})"),
        ("new prompt tokens/s per GPU", _number(rates["new_prompt"])),
        ("cached prompt tokens/s per GPU", _number(rates["cached_prompt"])),
        (
            "cached / ceiling (worst session)",
            f"{_number(cache['cached_over_ceiling'])} ({_number(cache['least_session'])})",
        ),
    ]
    if (cache["cached_over_ceiling"] or 0.0) > 1.0:
        table.append(("above the ceiling", "the server had text from before this run"))
    if got["promise"]:
        promised = got["promise"]["tokens_per_second"]
        table.append((f"answers at {promised:g} tokens/s or more", f"{got['promise']['kept']:.1%}"))
    if got["short_answers"]:
        table.append(("answers shorter than asked", str(got["short_answers"])))
    if not got["exact_counts"]:
        table.append(("tokens of an arrival", "shared out by length of text: the server doesn't say"))
    for kind, count in got["errors"].items():
        table.append((f"errors: {kind}", f"{count} ({got['error_examples'][kind][:80]})"))
    if got["sessions_given_up"] or got["turns_left_out"]:
        table.append(
            ("sessions given up, turns left out", f"{got['sessions_given_up']}, {got['turns_left_out']}")
        )
    return table


def _of(values: dict[str, float] | None, *names: str) -> str:
    return "unknown" if values is None else " / ".join(f"{values[name]:g}" for name in names)


def _number(value: float | None) -> str:
    return "unknown: the server doesn't say" if value is None else f"{value:g}"
