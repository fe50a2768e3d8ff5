"""The latency benchmark of several ranks: the same figures as of one, over all rows of all groups."""

import json
from pathlib import Path

import pytest
from driving import Checkpoints
from typer.testing import CliRunner

from quickturn.bench import latency
from quickturn.cli.bench import app

COMMON = (
    "--device cpu --dtype float32 --memory 8MiB --max-requests 4 --max-step-tokens 64 --steps 4 --repeats 1"
    " --decode 4x16 --first-token 32 --at-once 3x9x12"
)


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "CPU_COPY_BYTES", 1 << 20)


@pytest.mark.parametrize(
    ("family", "options", "mesh"),
    [
        ("llama", ["--tp", "2"], {"tp": 2, "dp": 1}),
        ("llama", ["--dp", "2", "--dense-tp", "2"], {"dp": 2, "dense_tp": 2}),
        ("qwen3-moe", ["--dp", "2", "--moe-tp", "1", "--ep", "2"], {"dp": 2, "moe_tp": 1, "ep": 2}),
    ],
    ids=["tp", "dp", "ep"],
)
def test_latency_of_several_ranks(
    checkpoints: Checkpoints, tmp_path: Path, family: str, options: list[str], mesh: dict[str, int]
) -> None:
    output = tmp_path / "latency.json"
    command = ["latency", str(checkpoints(family).path), *COMMON.split(), *options, "--output", str(output)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(output.read_text())
    assert found["config"] | mesh == found["config"]
    (decode,) = found["decode"]
    assert (decode["batch"], decode["context"]) == (4, 16)
    assert decode["tokens_per_second"] > 0
    (first,) = found["first_token"]
    assert first["again_cached"] == 0
    assert found["at_once"][0]["decode"]["batch"] == 3


def test_a_mesh_that_cant_be_is_refused(checkpoints: Checkpoints) -> None:
    result = CliRunner().invoke(
        app, ["latency", str(checkpoints("llama").path), "--tp", "2", "--ep", "3"], env={"COLUMNS": "400"}
    )
    assert result.exit_code == 2
    assert "--ep 3 doesn't divide" in result.output
