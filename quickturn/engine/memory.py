"""How much memory the cache takes when the operator names no bound."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

CPU_SHARE = 0.25
"""Share of the machine's free memory that the cache takes on a CPU; pages are committed when used."""

GPU_SHARE = 0.92
"""Share of the GPU's memory that weights, workspace and cache may take together."""

GPU_WORKSPACE_BYTES = 2 << 30
"""Left free beside the cache for activations and graphs."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def default_memory(device: torch.device, ranks: int = 1) -> int:
    """Bytes for the cache; called after the weights were loaded. `ranks`: how many share the device's
    memory, all of which have loaded theirs. Raises MemoryError when they leave too little.
    """
    if device.type != "cuda":
        return int(free_memory() * CPU_SHARE / ranks)
    free, total = torch.cuda.mem_get_info(device)
    room = (free - int(total * (1 - GPU_SHARE))) // ranks - GPU_WORKSPACE_BYTES
    if room <= 0:
        raise MemoryError(
            f"the weights leave {free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB on {device}: too little"
            " for a cache; use a smaller model or --quantization fp8, or name a small --memory"
        )
    return room


@contextmanager
def room_for(what: str, advice: str) -> Iterator[None]:
    """Within the block, the device's being out of memory becomes a MemoryError that says what there was no
    room for, and what to do.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"no room for {what}: {advice} ({str(error).splitlines()[0]})") from error


def free_memory() -> int:
    """Bytes that this process could still take: what the machine has available (its page cache can go), or
    what the container's limit leaves if that is less.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _MEMINFO.is_file():
        available = _fields(_MEMINFO).get("MemAvailable:", available >> 10) << 10
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (bound := limit.read_text().strip()) != "max":
        reclaimable = _fields(_CGROUP / "memory.stat").get("inactive_file", 0)
        available = min(available, int(bound) - int(used.read_text()) + reclaimable)
    return max(available, 0)


def _fields(path: Path) -> dict[str, int]:
    """Names and numbers of a file with one of each a line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
