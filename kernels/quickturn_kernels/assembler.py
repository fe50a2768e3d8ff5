"""Which ptxas Triton is to call.

Release 12.8, which comes with Triton up to 3.6, miscompiles some kernels that keep many registers beside
wgmma: of a shared memory descriptor that several products need, it computes some from R1, the stack pointer,
and the product reads memory that isn't there. The gated delta rule's scan over prompts dies of that with an
illegal memory access. Releases 12.9 and 13.0 assemble the same PTX rightly.
"""

import os
import re
import subprocess
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from quickturn_kernels import cuda_build

BROKEN = (12, 8)
SWITCH = "TRITON_PTXAS_PATH"
"""Triton's own."""


@cache
def replace_broken() -> None:
    """Point Triton, in this process and its children, to another assembler if its own is of the broken
    release.

    Warns if there is no other. Does nothing where the user has chosen one, or where Triton has none.
    """
    spec = find_spec("triton")
    if SWITCH in os.environ or spec is None or spec.origin is None:
        return
    tools = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    if release(tools / "ptxas") != BROKEN:
        return
    other = later(tools)
    if other is not None:
        os.environ[SWITCH] = str(other)
    else:
        warnings.warn(
            f"Triton's ptxas 12.8 miscompiles large kernels; name another in {SWITCH}", stacklevel=2
        )


def later(tools: Path) -> Path | None:
    """A later ptxas than the broken one: Triton brings one for later GPUs, the CUDA toolkit has one."""
    nvcc = cuda_build.compiler()
    candidates = [tools / "ptxas-blackwell", *([] if nvcc is None else [Path(nvcc).with_name("ptxas")])]
    return next((path for path in candidates if (release(path) or BROKEN) > BROKEN), None)


def release(path: Path) -> tuple[int, int] | None:
    """The release of a ptxas, (12, 8) for 12.8; None if there is none."""
    try:
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))
