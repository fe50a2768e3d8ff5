"""Bundles: written and read, by the library and by the program; runs of them again, and two side by side."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from typer.testing import CliRunner

from quickturn.cli.main import build
from quickturn.validate import bundle
from quickturn.validate.compare import compare
from quickturn.validate.report import Finding, Report

ENVIRONMENT: dict[str, Any] = {
    "code": {"version": "1", "commit": "abc", "sources": "12"},
    "versions": {"torch": "2"},
    "device": {"name": "one"},
}
SPEED = Finding("performance", "decode 1 x 10", "passed", "", {"tokens_per_second": 100.0, "roof_share": 0.5})
RIGHT = Finding("numerics", "rms_norm=cpu: 5", "passed")


def report(*findings: Finding) -> Report:
    return Report({"seed": 1}, ENVIRONMENT, list(findings), {"rms_norm=cpu": 4})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "one.tar.zst"
    bundle.write(path, report(RIGHT, SPEED), "a line\n")
    assert bundle.read(path) == report(RIGHT, SPEED)
    assert [file.name for file in tmp_path.iterdir()] == ["one.tar.zst"]


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd program")
def test_the_program_does_where_the_library_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one.tar.zst", tmp_path / "other.tar.zst"
    bundle.write(one, report(RIGHT), "")
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "find_spec", lambda name: None)
        assert bundle.read(one) == report(RIGHT)
        bundle.write(other, report(SPEED), "")
        patch.setenv("PATH", "")
        with pytest.raises(ValueError, match="pip install zstandard"):
            bundle.check_writable(tmp_path / "third.tar.zst")
        with pytest.raises(ValueError, match="pip install zstandard"):
            bundle.read(one)
    assert bundle.read(other) == report(SPEED)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"nothing of the kind", "not a zstd file"),
        (zstandard.compress(b"no archive" * 200), "not a validation bundle"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "one.tar.zst"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match):
        bundle.read(path)


def test_a_report_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.tar.zst"
    bundle.write(path, replace(report(RIGHT), format=99), "")
    with pytest.raises(ValueError, match="format 99"):
        bundle.read(path)


def test_names_and_places_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.tar\.zst"):
        bundle.check_writable(tmp_path / "one.zip")
    with pytest.raises(ValueError, match="no directory"):
        bundle.check_writable(tmp_path / "not there" / "one.tar.zst")


def test_two_reports_side_by_side() -> None:
    assert list(compare(report(RIGHT, SPEED), report(RIGHT, SPEED), 0.05)) == []
    slower = replace(SPEED, figures={"tokens_per_second": 90.0, "roof_share": 0.5})
    (found,) = compare(report(SPEED), report(slower), 0.05)
    assert (found.kind, found.what) == ("worse", "performance: decode 1 x 10: tokens_per_second")
    assert list(compare(report(SPEED), report(slower), 0.2)) == []
    (found,) = compare(report(slower), report(SPEED), 0.05)
    assert found.kind == "better"
    wrong = replace(RIGHT, status="failed", detail="out")
    assert [one.kind for one in compare(report(RIGHT), report(wrong), 0.05)] == ["worse"]
    assert [one.kind for one in compare(report(wrong), report(RIGHT), 0.05)] == ["better"]
    assert [one.kind for one in compare(report(), report(wrong), 0.05)] == ["worse"]
    assert [one.kind for one in compare(report(RIGHT), report(), 0.05)] == ["only one"]
    absent = replace(RIGHT, status="absent")
    assert [one.kind for one in compare(report(RIGHT), report(absent), 0.05)] == ["moved"]
    elsewhere = replace(report(RIGHT), environment=ENVIRONMENT | {"device": {"name": "other"}})
    assert [one.kind for one in compare(report(RIGHT), elsewhere, 0.05)] == ["bound"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build("validate"), ["validate", *arguments])
    return result.exit_code, result.output


def test_a_run_can_be_run_again_and_compared(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Everything, as small as it gets: each section, the bundle, the same again, and a path not taken."""
    first, second = tmp_path / "first.tar.zst", tmp_path / "second.tar.zst"
    small = ["--lengths", "5,40", "--answer", "6", "--sweep", "20", "--rows", "3", "--repeats", "2"]
    small += ["--batches", "2", "--contexts", "24", "--memory", "8MiB", "--block-tokens", "16"]
    small += ["--dtype", "float32", "--device", "cpu", "--expect", "gather_decode=reference"]
    code, output = run(str(model("llama")), *small, "--output", str(first))
    assert code == 0, output
    for section in ("numerics", "repeats", "parity", "features", "performance", "paths"):
        assert f"{section}: " in output
    found = bundle.read(first)
    assert {finding.section for finding in found.findings} >= {"numerics", "parity", "features", "paths"}
    assert found.environment["code"]["sources"]
    assert found.paths["step=kernels"] > 0
    code, output = run("--rerun", str(first), "--output", str(second), "--tolerance", "1000")
    assert code == 0, output
    code, output = run("--compare", str(first), str(second), "--tolerance", "1000")
    # Somebody may be editing the sources meanwhile.
    told = [line for line in output.splitlines() if not line.startswith("bound: code:")]
    assert code == 0
    assert told in ([], ["no difference"])


def test_a_path_that_was_not_taken_fails_the_run(model: Callable[[str], Path]) -> None:
    small = [
        "--sections",
        "features",
        "--lengths",
        "5",
        "--answer",
        "4",
        "--memory",
        "8MiB",
        "--dtype",
        "float32",
    ]
    code, output = run(str(model("llama")), *small, "--device", "cpu", "--expect", "linear=hopper")
    assert code == 1
    assert "failed paths: linear=hopper: never taken; instead: {'linear=" in output
