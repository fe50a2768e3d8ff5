"""A sweep goes on where it was stopped; results are whole or not there; keys are in none of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_world import tiny_config
from tiny_text import write_tiny_text
from typer.testing import CliRunner

from quickturn.bench.agent import report
from quickturn.bench.agent.sweep import Cell, finished, grid, serving, sweep
from quickturn.cli.bench import app

SMALL = ["--first", "60", "--grow", "10", "--turns", "2", "--answer", "5", "--timeout", "30"]


def result(users: int) -> dict[str, Any]:
    return {"kind": "agent", "users": users}


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    ran: list[Cell] = []

    def measure(cell: Cell) -> dict[str, Any]:
        ran.append(cell)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return result(cell.concurrency)

    cells = grid([1, 2, 4], [0.0, 70.0])
    settings = {"scale": 0.5}
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, cells, settings, measure, print)
    # Killed while it wrote the fourth: what is half there isn't taken.
    (tmp_path / cells[3].file).write_text(json.dumps(result(1))[:-3])
    (tmp_path / cells[4].file).write_text('{"kind": "something else"}')
    found = sweep(tmp_path, cells, settings, measure, print)
    assert ran == [*cells[:3], *cells[2:]]
    assert [one["users"] for one in found] == [1, 2, 4, 1, 2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(cell.file for cell in cells)
    assert sweep(tmp_path, cells, settings, measure, print) == found
    assert len(ran) == 7
    with pytest.raises(ValueError, match="other settings"):
        sweep(tmp_path, cells, {"scale": 1.0}, measure, print)


@pytest.mark.parametrize("users", [[], [0], [2, 2]])
def test_grids_that_cannot_be_run(users: list[int]) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        grid(users, [0.0])


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.json"
    report.write(path, result(1))
    assert report.read(path) == result(1)
    with pytest.raises(TypeError):
        report.write(path, result(2) | {"no json": object()})
    assert finished(path) == result(1)
    assert [one.name for one in path.parent.iterdir()] == ["run.json"]


def test_a_killed_sweep_goes_on(bench_server: Callable[[], str], tmp_path: Path) -> None:
    """The command as a process, killed in its second cell, where the server stalls until a key is given."""
    words = ["sweep", "stalls", "--url", bench_server(), "--concurrency", "1,2,3", *SMALL]
    words += ["--output", str(tmp_path)]
    start = "from quickturn.cli.main import app; app()"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", start, "bench", *words], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("promise0_users2.json: running"):
                process.send_signal(signal.SIGKILL)
    first = tmp_path / "promise0_users1.json"
    written = os.stat(first).st_mtime_ns
    assert not (tmp_path / "page.html").exists()
    done = CliRunner().invoke(app, [*words, "--api-key", "go"])
    assert done.exit_code == 0, done.output
    assert os.stat(first).st_mtime_ns == written
    names = {path.name for path in tmp_path.iterdir()}
    assert {f"promise0_users{users}.json" for users in (1, 2, 3)} | {"page.html"} == names
    found = report.read(tmp_path / "promise0_users3.json")
    assert (found["load"]["concurrency"], found["load"]["sessions"]) == (3, 6)
    assert found["figures"]["errors"] == {}


def test_the_command_writes_what_it_found_and_no_key(
    bench_server: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, out, page = bench_server(), tmp_path / "run.json", tmp_path / "run.html"
    words = ["agent", "--url", url, "--concurrency", "2", "--gpus", "2", "--api-key", "sk-secret", *SMALL]
    words += ["--output", str(out), "--page", str(page), "--label", "scripted"]
    monkeypatch.setattr(sys, "argv", ["quickturn", "bench", *words])
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert (found["label"], found["gpus"], found["figures"]["requests"]) == ("scripted", 2, 8)
    assert found["server"]["models"] == {"object": "list", "data": [{"id": "fine"}]}
    assert "--api-key ***" in found["environment"]["command"]
    assert len(found["requests"]) == 8
    assert "scripted" in done.output
    for path in (out, page):
        assert "sk-secret" not in path.read_text()


def test_keys_are_left_out_of_commands() -> None:
    words = ["bench", "--api-key", "k1", "--api-key=k2", "--label", "x"]
    assert report.without_secrets(words) == ["bench", "--api-key", "***", "--api-key=***", "--label", "x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["agent", "--url", "http://127.0.0.1:9/v1"], "no server answers"),
        (["agent", "--api", "xml"], "xml"),
        (["agent", "--turns", "few"], "few"),
        (["agent", "--trace", "/nowhere.json"], "nowhere"),
        (["sweep"], "name a model"),
        (["sweep", "--url", "http://127.0.0.1:9/v1", "--promise", "70"], "--promise"),
        (["page", "/nowhere.json"], "nowhere"),
    ],
)
def test_mistakes_are_explained(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert message in done.output
    assert not isinstance(done.exception, KeyError | TypeError)


def test_a_server_that_does_not_start_is_explained(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ValueError, match="did not start"), serving("/nowhere", [], log):
        pass
    assert "neither a directory" in log.read_text()


def test_a_sweep_over_servers_of_our_own(tmp_path: Path) -> None:
    """Two promises, two real servers with a tiny model of random weights whose tokens are bytes."""
    model = write_tiny_text(tmp_path / "tiny")
    (model / "config.json").write_text(json.dumps(tiny_config(262)))
    out = tmp_path / "out"
    words = ["sweep", str(model), "--serve", "--load-format dummy --memory 8MiB --device cpu --dtype float32"]
    words += ["--promise", "0,5", "--concurrency", "2", "--first", "400", "--grow", "90", "--turns", "2"]
    words += ["--answer", "9", "--seed", "1", "--timeout", "30", "--output", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    runs = [report.read(out / f"promise{promise}_users2.json") for promise in (0, 5)]
    assert [run["label"] for run in runs] == ["quickturn", "quickturn, promise 5"]
    assert runs[0]["server"]["url"] != runs[1]["server"]["url"]
    for run in runs:
        figures = run["figures"]
        assert (figures["errors"], figures["requests"], figures["short_answers"]) == ({}, 8, 0)
        # Bytes: a word and its space are several tokens, and the probes found how many.
        assert 3 < run["warm_up"]["tokens_per_word"] < 8
        assert 300 < run["requests"][0]["prompt"] < 600
        assert 0.5 < figures["cache"]["cached_over_ceiling"] <= 1.0
    assert (out / "page.html").exists()
