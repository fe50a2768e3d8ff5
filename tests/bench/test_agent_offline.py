"""The same sessions on an engine without a server: known steps on a clock that they move; a real engine."""

import importlib.util
import json
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from bench_world import tiny_config
from typer.testing import CliRunner

from quickturn.bench.agent.engine import measure_engine
from quickturn.bench.agent.figures import figures
from quickturn.bench.agent.load import Load
from quickturn.bench.agent.offline import Offline, warm_up
from quickturn.bench.agent.run import Pace
from quickturn.bench.agent.sessions import Session
from quickturn.bench.agent.synthetic import Shape, sessions
from quickturn.cli.bench import app
from quickturn.config import EngineConfig
from quickturn.engine.messages import AddRequest, StepOutput, TokenOutput


class SteppedCore:
    """A step takes 1/8 of a second; a prompt takes two, each token behind it one. It caches for ever."""

    def __init__(self) -> None:
        self.now = 0.0
        self.most = 0
        self.sent: list[list[int]] = []
        self._running: dict[int, list[int]] = {}
        self._asked: dict[int, AddRequest] = {}

    def add(self, request: AddRequest) -> None:
        self._asked[request.id] = request
        self._running[request.id] = []
        self.most = max(self.most, len(self._running))

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> StepOutput:
        self.now += 0.125
        outputs = []
        for id, made in list(self._running.items()):
            request = self._asked[id]
            made.append(100 + len(made))
            if len(made) == 1:
                continue
            prompt = array("i", request.tokens).tolist()
            if len(prompt) > 4000:
                outputs.append(TokenOutput(id, [], "error", 0, None, "too long"))
                del self._running[id]
                continue
            first = len(made) == 2
            cached = max((shared(prompt, other) for other in self.sent), default=0) if first else -1
            over = len(made) == request.sampling.max_tokens + 1
            if first:
                self.sent.append(prompt)
            if over:
                self.sent.append(prompt + made[1:])
                del self._running[id]
            outputs.append(TokenOutput(id, made[-1:], "length" if over else "", cached))
        return StepOutput(outputs)


def shared(one: list[int], other: list[int]) -> int:
    for at, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return min(at, len(one) - 1)
    return min(len(one) - 1, len(other))


def held(core: SteppedCore, load: list[Session], pace: Pace) -> tuple[Any, Any]:
    def sleep(seconds: float) -> None:
        core.now += seconds

    run = Offline(core, 1000, pace, lambda: core.now).hold(load, sleep=sleep)
    return run, figures(run, 1)


def test_known_steps_give_known_figures() -> None:
    core = SteppedCore()
    load = sessions(Shape(first=100, grow=10, turns=(3, 3), answer=5, think=2.0), 4)
    run, found = held(core, load, Pace(2, think_scale=0.5))
    assert core.most == 2
    assert found["requests"] == 12
    # Two rounds of two users: three turns of 6 steps each, and a second between them twice.
    assert found["seconds"] == 2 * (3 * 6 * 0.125 + 2 * 1.0)
    assert found["user_tokens_per_second"]["median"] == 8.0
    assert found["gap_ms"]["p99"] == 125.0
    assert found["first_token_ms"]["later_turns"]["most"] == 250.0
    assert found["tokens"]["prompt"] == sum(turn.prompt for one in load for turn in one.turns)
    assert found["tokens"]["answer"] == 60
    # A cache without end is its own ceiling, answers included.
    assert found["cache"]["cached_over_ceiling"] == found["cache"]["least_session"] == 1.0
    later = sorted(record.ceiling for record in run.records if record.turn == 2)
    assert later == [120] * 4


def test_a_request_that_is_refused_ends_its_session() -> None:
    load = sessions(Shape(first=3990, grow=10, turns=(3, 3), answer=5), 1)
    load += sessions(Shape(first=100, grow=10, turns=(3, 3), answer=5), 1, seed=1)
    _, found = held(SteppedCore(), load, Pace(1))
    assert (found["errors"], found["requests"]) == ({"error": 1}, 4)
    assert found["error_examples"] == {"error": "too long"}
    assert (found["sessions_given_up"], found["turns_left_out"]) == (1, 1)


def test_no_turn_begins_after_the_limit() -> None:
    load = sessions(Shape(first=100, grow=10, turns=(4, 4), answer=5), 3)
    run, found = held(SteppedCore(), load, Pace(1, limit=1.0))
    assert (found["requests"], found["turns_left_out"], run.seconds) == (2, 10, 1.5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(tiny_config(512)))
    return folder


def test_a_real_engine(tiny: Path) -> None:
    config = EngineConfig(
        str(tiny),
        dtype="float32",
        device="cpu",
        load_format="dummy",
        memory=8 << 20,
        max_requests=3,
        min_tps_per_user=1.0,
    )
    load = Load(4, 1, shape=Shape(first=300, grow=40, turns=(2, 3), answer=6))
    found = measure_engine(config, load, Pace(3), "tiny", 1, ["a", "--api-key", "k"])
    got = found["figures"]
    assert (got["requests"], got["errors"], got["short_answers"]) == (found["load"]["turns"], {}, 0)
    assert got["tokens"]["prompt"] == found["load"]["asked_prompt_tokens"]
    # Whole blocks of 64 are cached, and nothing that wasn't there.
    assert 0.7 < got["cache"]["cached_over_ceiling"] <= 1.0
    assert all(one["cached"] <= one["ceiling"] for one in found["requests"])
    assert got["promise"]["tokens_per_second"] == 1.0
    assert found["config"]["max_requests"] == 3
    assert found["environment"]["command"] == "a --api-key ***"


def test_warming_up_says_when_the_engine_is_too_small() -> None:
    class Refusing(SteppedCore):
        def step(self) -> StepOutput:
            ids, self._running = list(self._running), {}
            return StepOutput([TokenOutput(id, [], "error", 0, None, "no room") for id in ids])

    with pytest.raises(ValueError, match="no room"):
        warm_up(Refusing(), 1000, sessions(Shape(), 2))
    core = SteppedCore()
    warm_up(core, 1000, sessions(Shape(first=3000, turns=(3, 3)), 2))
    assert (core.most, len(core.sent), max(map(len, core.sent))) == (2, 8, 3000 + 16 + 800 + 16)


def test_the_command_offline(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    words = ["agent", "--offline", str(tiny), "--load-format", "dummy", "--memory", "8MiB", "--first", "200"]
    words += ["--grow", "10", "--turns", "2", "--answer", "4", "--sessions", "1", "--output", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["figures"]["requests"] == 2


def test_it_needs_no_server_libraries() -> None:
    """On a bare GPU machine there are none."""
    missing = ["httptools", "starlette", "uvicorn", "zmq", "msgspec", "rich", "typer", "prometheus_client"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}));"
        "import quickturn.bench.agent.engine, quickturn.bench.agent.page"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_script_for_a_bare_machine(tiny: Path, tmp_path: Path) -> None:
    """All cells and the page; run again, nothing but what is missing."""
    script = Path(__file__).parents[2] / "benchmarks" / "agent_h200.py"
    words = ["--model", str(tiny), "--device", "cpu", "--dtype", "float32", "--memory", str(8 << 20)]
    words += ["--concurrency", "1", "2", "--first", "200", "--grow", "10", "--turns", "2", "--answer", "4"]
    spec = importlib.util.spec_from_file_location("agent_h200", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main([*words, "--output", str(tmp_path)])
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"promise70_users1.json", "promise70_users2.json", "page.html"}
    (tmp_path / "promise70_users2.json").unlink()
    kept = (tmp_path / "promise70_users1.json").read_bytes()
    module.main([*words, "--output", str(tmp_path)])
    assert (tmp_path / "promise70_users1.json").read_bytes() == kept
    found = json.loads((tmp_path / "promise70_users2.json").read_text())
    assert (found["figures"]["requests"], found["load"]["concurrency"]) == (4, 2)
    # Without time, no turn begins, and it says so.
    short = tmp_path / "short"
    module.main([*words, "--budget", "0", "--output", str(short)])
    assert not short.exists()
