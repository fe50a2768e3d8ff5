"""CUDA C++ kernels: compiled when first needed, kept for the next start.

The sources have a C interface, so that the compiler alone makes a library of each and ctypes calls it. It
lies in the user's cache directory under a name made of the source's and all headers' content, the
architecture and the flags: an edit makes a new one.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

import torch

ARCHITECTURES = {(9, 0): "90a"}
"""The CUDA capabilities that have kernels here, and their targets; "a" has the instructions of this one
architecture.
"""

_EXPORTED = re.compile(r'^extern "C" int (\w+)\(', re.MULTILINE)


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
    """Whether `library` can be had for this capability: there are kernels, and a compiler or what an earlier
    one left.
    """
    return capability in ARCHITECTURES and (
        compiler() is not None or all(_path(source, capability).exists() for source in sources())
    )


@cache
def sources() -> tuple[Path, ...]:
    """The CUDA sources. Each becomes a library of its own, so that nobody waits for kernels of others."""
    return tuple(sorted(source_directory().glob("*.cu")))


class Library:
    """The kernels of one capability by the names of their C functions.

    A function's source is compiled when the function is first asked for. On a machine with a GPU the first to
    ask also sets off the compilation of all the others, on as many threads as there are cores: what a model
    needs next is ready, or nearly, when it asks.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        """Reads the sources for the functions that they export; compiles nothing."""
        self._capability = capability
        self._source = {
            name: source for source in sources() for name in _EXPORTED.findall(source.read_text())
        }
        self._functions: dict[str, ctypes._FuncPointer] = {}
        self._lock = threading.Lock()
        self._begun = False

    def __getattr__(self, name: str) -> "ctypes._FuncPointer":
        """The C function `name`. Raises CompileError with the compiler's own words, AttributeError for a
        function that no source exports.
        """
        if name.startswith("_") or name not in self._source:
            raise AttributeError(f"no CUDA source exports {name}")
        with self._lock:
            if not self._begun and torch.cuda.is_available():
                self._begun = True
                self._compile_others(self._source[name])
        if name not in self._functions:
            built = ctypes.CDLL(str(build(self._source[name], self._capability)))
            self._functions[name] = getattr(built, name)
        return self._functions[name]

    def _compile_others(self, first: Path) -> None:
        rest = [source for source in sources() if source != first]
        missing = [source for source in rest if not _path(source, self._capability).exists()]
        waiting = iter(missing)
        taking = threading.Lock()

        def work() -> None:
            while True:
                with taking:
                    source = next(waiting, None)
                if source is None:
                    return
                # Whoever asks for its kernels compiles it again, and is told what is wrong.
                with contextlib.suppress(CompileError, OSError):
                    build(source, self._capability)

        for _ in range(min(len(missing), (os.cpu_count() or 2) - 1)):
            threading.Thread(target=work, name="nvcc", daemon=True).start()


@cache
def library(capability: tuple[int, int]) -> Library:
    """The kernels for a CUDA capability. Raises CompileError when there are none for it."""
    _check(capability)
    return Library(capability)


def build(source: Path, capability: tuple[int, int]) -> Path:
    """Compile `source` for a CUDA capability unless that was done before; returns the library's path. Needs
    no GPU. Threads that want the same one wait for each other.
    """
    _check(capability)
    path = _path(source, capability)
    with _lock_of(path):
        if path.exists():
            return path
        nvcc = compiler()
        if nvcc is None:
            raise CompileError("nvcc was not found; install the CUDA toolkit or set CUDA_HOME")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Compiled under another name and then renamed: two processes may do this at once, and one may be
        # killed.
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            result = Path(work) / "library.so"
            command = [nvcc, *_flags(capability), "-shared", "-o", str(result), str(source)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                raise CompileError(f"{' '.join(command)} failed:\n{run.stdout}{run.stderr}")
            result.replace(path)
    return path


def _check(capability: tuple[int, int]) -> None:
    if capability not in ARCHITECTURES:
        raise CompileError(f"there are no CUDA C++ kernels for capability {capability}")


@cache
def _lock_of(path: Path) -> threading.Lock:
    return threading.Lock()


def _flags(capability: tuple[int, int]) -> list[str]:
    target = ARCHITECTURES[capability]
    return [
        "-std=c++17",
        "-O3",
        f"-gencode=arch=compute_{target},code=sm_{target}",
        "-Xcompiler=-fPIC",
        "-ldl",
        "-Xlinker=-z,defs",  # a source that needs another is refused when it is linked, not when it is loaded
    ]


@cache
def _path(source: Path, capability: tuple[int, int]) -> Path:
    digest = hashlib.sha256(" ".join(_flags(capability)).encode())
    headers = [path for path in source.parent.iterdir() if path.suffix in (".cuh", ".h")]
    for part in (source, *sorted(headers)):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    name = f"{source.stem}_sm_{ARCHITECTURES[capability]}_{digest.hexdigest()[:20]}.so"
    return cache_directory() / name
