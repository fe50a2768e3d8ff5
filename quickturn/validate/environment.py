"""What a result is bound to: the code down to its bytes, the versions under it, and the machine."""

import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import quickturn_control
import quickturn_kernels
import torch
from quickturn_kernels import current

import quickturn
from quickturn.bench.machine import commit
from quickturn.bench.offline import machine

PACKAGES = ("torch", "triton", "numpy", "safetensors", "transformers", "xgrammar")

SOURCES = {".py", ".cpp", ".hpp", ".h", ".cu", ".cuh", ".so"}


def environment() -> dict[str, Any]:
    """Code, versions and machine; ready for JSON."""
    platform = current()
    return {
        "code": {
            "version": quickturn.__version__,
            "commit": commit() or None,
            "sources": digest(_packages()),
        },
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "device": {
            "name": platform.name,
            "units": platform.units,
            "memory": platform.memory,
            "capability": list(platform.capability),
        },
        "machine": {key: value for key, value in machine().items() if key != "command"},
    }


def digest(folders: Iterable[Path]) -> str:
    """SHA-256 over the names and bytes of all sources and libraries under `folders`."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(_sources(folder)):
            total.update(path.relative_to(folder).as_posix().encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def _packages() -> list[Path]:
    modules = (quickturn, quickturn_kernels, quickturn_control)
    return [Path(folder) for module in modules for folder in module.__path__]


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in SOURCES and path.is_file())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if not torch.cuda.is_available():
        return None
    try:
        run = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.split("\n")[0].strip() or None
