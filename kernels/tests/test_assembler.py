"""Triton's assembler is replaced where it is the broken release, and only there."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from quickturn_kernels import assembler, cuda_build


def tool(path: Path, release: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.93'\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a Triton without tools would have them; no toolkit, and no choice of the user's."""
    origin = str(tmp_path / "triton" / "__init__.py")
    monkeypatch.setattr(assembler, "find_spec", lambda name: SimpleNamespace(origin=origin))
    monkeypatch.setattr(cuda_build, "compiler", lambda: None)
    monkeypatch.delenv(assembler.SWITCH, raising=False)
    return tmp_path / "triton" / "backends" / "nvidia" / "bin"


def chosen(monkeypatch: pytest.MonkeyPatch) -> str | None:
    # As monkeypatch sees it, so that what the function sets goes away with the test.
    monkeypatch.setenv(assembler.SWITCH, "")
    del os.environ[assembler.SWITCH]
    assembler.replace_broken.__wrapped__()
    return os.environ.get(assembler.SWITCH)


def test_a_sound_one_stays(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools / "ptxas", "12.9")
    tool(tools / "ptxas-blackwell", "13.0")
    assert chosen(monkeypatch) is None


def test_the_broken_one_gives_way_to_its_neighbour(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools / "ptxas", "12.8")
    tool(tools / "ptxas-blackwell", "12.9")
    assert chosen(monkeypatch) == str(tools / "ptxas-blackwell")


def test_or_to_the_toolkits(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools / "ptxas", "12.8")
    tool(tools / "ptxas-blackwell", "12.8")
    tool(tmp_path / "cuda" / "bin" / "ptxas", "13.0")
    monkeypatch.setattr(cuda_build, "compiler", lambda: str(tmp_path / "cuda" / "bin" / "nvcc"))
    assert chosen(monkeypatch) == str(tmp_path / "cuda" / "bin" / "ptxas")


def test_without_another_there_is_a_warning(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools / "ptxas", "12.8")
    with pytest.warns(UserWarning, match="miscompiles"):
        assert chosen(monkeypatch) is None


def test_the_users_choice_stays(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tools / "ptxas", "12.8")
    tool(tools / "ptxas-blackwell", "12.9")
    monkeypatch.setenv(assembler.SWITCH, "mine")
    assembler.replace_broken.__wrapped__()
    assert os.environ[assembler.SWITCH] == "mine"


def test_no_triton_no_tools(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch) is None
