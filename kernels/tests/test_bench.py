"""The benchmark runs, counts what it should, and writes its file."""

import json
from pathlib import Path

import pytest
import torch

from quickturn_kernels.bench import __main__ as bench
from quickturn_kernels.bench import measure, problems
from quickturn_kernels.bench.measure import Roof

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CPU_SECONDS", 0.0)
    monkeypatch.setattr(bench, "roof", lambda device, dtype: Roof(1e10, 1e11))


def test_counts_of_attention() -> None:
    make = problems.Problems(problems.SMOLLM2, CPU, torch.float32)
    decode = make.decode((10, 30))
    assert decode.moved == 4 * 64 * 2 * (40 * 3 + 2 * 9)
    assert decode.flops == 40 * 9 * 64 * 4
    # Three queries at the end of ten keys see 8, 9 and 10 of them.
    assert make.prefill((3,), (10,)).flops == (8 + 9 + 10) * 9 * 64 * 4
    assert make.prefill((3, 3, 4), (5, 5, 5)).shape == "9/3 d64 2 x 3 + 1 x 4 at 3 x 5"


def test_roof_binds_by_the_slower_resource() -> None:
    assert Roof(100.0, 1000.0).seconds(50, 100) == 0.5
    assert Roof(100.0, 1000.0).seconds(5, 900) == 0.9


def test_command_line_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    arguments = [
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--op",
        "rms_norm",
        "--shape",
        "1 x",
        "--json",
        str(file),
    ]
    assert bench.main([*arguments, "--implementation", "reference"]) == 0
    report = json.loads(file.read_text())
    assert [line["shape"] for line in report["results"]] == ["1 x 576"]
    assert report["results"][0]["microseconds"] > 0
    assert "1 x 576" in capsys.readouterr().out


def test_every_problem_builds_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = problems.Model(32, 48, 4, 2, 16, 64)
    monkeypatch.setattr(problems, "SMOLLM2", tiny)
    for problem in problems.problems(CPU, torch.float32):
        if "512" in problem.shape or "2048" in problem.shape:
            continue
        problem.build()()
