"""CUDA C++ kernels: compiled when first needed, kept for the next start.

The sources have a C interface, so that the compiler alone makes a library of them in seconds and ctypes
calls it. It lies in the user's cache directory under a name made of the sources' content, the architecture
and the compiler: an edit makes a new one.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

ARCHITECTURES = {(9, 0): "90a"}
"""The CUDA capabilities that have kernels here, and their targets; "a" has the instructions of this one
architecture.
"""


class CompileError(RuntimeError):
    """The CUDA compiler is missing, or refused the sources."""


def source_directory() -> Path:
    """Where the CUDA sources lie: beside the modules when installed, in csrc/ in a checkout."""
    package = Path(__file__).parent
    installed = package / "csrc_cuda"
    return installed if installed.exists() else package.parent / "csrc" / "cuda"


@cache
def compiler() -> str | None:
    """The path of nvcc, found as PyTorch finds it ($CUDA_HOME, the search path, /usr/local/cuda), or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    for candidate in (f"{home}/bin/nvcc" if home else None, shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"):
        if candidate is not None and os.access(candidate, os.X_OK):
            return candidate
    return None


def cache_directory() -> Path:
    """Where compiled libraries are kept: $XDG_CACHE_HOME/quickturn/kernels, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "quickturn" / "kernels"


def available(capability: tuple[int, int]) -> bool:
    """Whether `library` can be had for this capability: there are kernels, and a compiler or an earlier
    result.
    """
    return capability in ARCHITECTURES and (compiler() is not None or _path(capability).exists())


@cache
def library(capability: tuple[int, int]) -> ctypes.CDLL:
    """The loaded library for a CUDA capability, compiled if it isn't kept yet (about five seconds).

    Raises CompileError with the compiler's own words.
    """
    return ctypes.CDLL(str(build(capability)))


def build(capability: tuple[int, int]) -> Path:
    """Compile for a CUDA capability unless that was done before; returns the library's path. Needs no GPU."""
    if capability not in ARCHITECTURES:
        raise CompileError(f"there are no CUDA C++ kernels for capability {capability}")
    path = _path(capability)
    if path.exists():
        return path
    nvcc = compiler()
    if nvcc is None:
        raise CompileError("nvcc was not found; install the CUDA toolkit or set CUDA_HOME")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Compiled under another name and then renamed: two processes may do this at once, and one may be killed.
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        result = Path(work) / "library.so"
        command = [
            nvcc,
            *_flags(capability),
            "--threads=0",  # the files at once, on as many cores as there are
            "-shared",
            "-o",
            str(result),
            *map(str, sorted(source_directory().glob("*.cu"))),
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise CompileError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
        result.replace(path)
    return path


def _flags(capability: tuple[int, int]) -> list[str]:
    target = ARCHITECTURES[capability]
    return [
        "-std=c++17",
        "-O3",
        f"-gencode=arch=compute_{target},code=sm_{target}",
        "-Xcompiler=-fPIC",
        "-ldl",
    ]


@cache
def _path(capability: tuple[int, int]) -> Path:
    digest = hashlib.sha256(" ".join(_flags(capability)).encode())
    for source in sorted(source_directory().iterdir()):
        if source.suffix in (".cu", ".cuh", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_directory() / f"sm_{ARCHITECTURES[capability]}_{digest.hexdigest()[:20]}.so"
