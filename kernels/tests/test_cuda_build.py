"""CUDA sources as libraries: one each, compiled when asked for, kept, and found by what they export."""

import re
from pathlib import Path

import pytest

from quickturn_kernels import cuda_build

HOPPER = (9, 0)
needs_compiler = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")
ASKED = re.compile(r"\.(quickturn_[a-z0-9_]+)")

GOOD = 'extern "C" int answer() { return 42; }\n'
BAD = 'extern "C" int wrong() { return nothing; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sources, one of which doesn't compile, and a cache of their own."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "good.cu").write_text(GOOD)
    (folder / "bad.cu").write_text(BAD)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda_build, "sources", lambda: (folder / "bad.cu", folder / "good.cu"))
    cuda_build._path.cache_clear()
    return folder


@needs_compiler
def test_a_source_that_fails_keeps_no_other_from_working(sources: Path) -> None:
    library = cuda_build.Library(HOPPER)
    assert library.answer() == 42
    with pytest.raises(cuda_build.CompileError, match="nothing"):
        library.wrong()
    with pytest.raises(AttributeError, match="missing"):
        library.missing()


@needs_compiler
def test_kept_for_the_next_start(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cuda_build.build(sources / "good.cu", HOPPER)
    monkeypatch.setattr(cuda_build, "compiler", lambda: None)
    assert cuda_build.build(sources / "good.cu", HOPPER) == path
    assert not cuda_build.available(HOPPER)
    monkeypatch.setattr(cuda_build, "sources", lambda: (sources / "good.cu",))
    assert cuda_build.available(HOPPER)


@needs_compiler
def test_an_edit_makes_a_new_one(sources: Path) -> None:
    assert cuda_build.Library(HOPPER).answer() == 42
    (sources / "good.cu").write_text(GOOD.replace("42", "43"))
    cuda_build._path.cache_clear()
    assert cuda_build.Library(HOPPER).answer() == 43


def test_no_kernels_for_other_architectures() -> None:
    assert not cuda_build.available((8, 0))
    with pytest.raises(cuda_build.CompileError, match="capability"):
        cuda_build.library((8, 0))


def test_every_function_that_is_asked_for_is_exported() -> None:
    package = Path(cuda_build.__file__).parent
    asked = {
        name
        for launcher in (package / "ops").rglob("*.py")
        for name in ASKED.findall(launcher.read_text())
        if not name.startswith("quickturn_kernels")
    }
    exported = cuda_build.library(HOPPER)._source
    assert len(asked) > 10
    assert asked <= set(exported), asked - set(exported)
