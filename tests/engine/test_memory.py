"""How much memory the cache may take by default: the machine's and the container's figures."""

from pathlib import Path

import pytest
import torch

from quickturn.engine import memory


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable: 8000 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    return tmp_path


def limit(machine: Path, maximum: str) -> None:
    (machine / "memory.max").write_text(f"{maximum}\n")
    (machine / "memory.current").write_text("3000000\n")
    (machine / "memory.stat").write_text("anon 1\ninactive_file 500000\n")


def test_the_page_cache_counts_as_free(machine: Path) -> None:
    assert memory.free_memory() == 8000 * 1024
    assert memory.default_memory(torch.device("cpu")) == 2000 * 1024


def test_a_containers_limit_is_kept(machine: Path) -> None:
    limit(machine, "4000000")
    assert memory.free_memory() == 1_500_000
    limit(machine, "2000000")
    assert memory.free_memory() == 0
    limit(machine, "max")
    assert memory.free_memory() == 8000 * 1024


def test_without_either_there_is_still_an_answer(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert memory.free_memory() > 0
