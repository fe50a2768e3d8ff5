"""What the Triton kernels share on the host side."""

import torch
from torch import Tensor

from quickturn_kernels import assembler, platform

INTERPRETED = platform.interpreting()
"""Fixed when the first Triton module is imported, as Triton itself fixes it. Kernels then get float32
operands for `tl.dot`: the interpreter multiplies bfloat16 wrongly.
"""

if not INTERPRETED:
    assembler.replace_broken()

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

INTERPRETED_UNITS = 3
"""Multiprocessors that interpreted kernels plan for: few, and odd, so that small tests reach every way of
splitting.
"""

HOPPER_SHARED_MEMORY = 227 << 10

COUNTERS = 1 << 16
SPARE_COUNTERS = 8
_spare: dict[torch.device, list[Tensor]] = {}
_taken: dict[tuple[torch.device, int], Tensor] = {}


def next_power_of_two(value: int) -> int:
    """The least power of two that is >= value (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()


def rows_pad(rows: int) -> int:
    """Power of two >= rows in coarse steps (32, 256, 2048, ...): each step is one more variant to compile."""
    size = 32
    while size < rows:
        size *= 8
    return size


def units(device: torch.device) -> int:
    """Multiprocessors to plan for."""
    return INTERPRETED_UNITS if device.type == "cpu" else platform.describe(device).units


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a program may use; the interpreter plans as for Hopper."""
    return HOPPER_SHARED_MEMORY if device.type == "cpu" else platform.describe(device).shared_memory


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros, which every kernel that uses them leaves zero again.

    Each stream has its own, so that kernels that may overlap never share them; graphs captured on one
    stream must not be replayed at the same time on two. They are never freed, because captured graphs keep
    their address, and some are made ahead, because a capture can't fill memory now: the first call on a
    device should come before any capture.
    """
    if device.type != "cuda" or count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    kept = _taken.get(key)
    if kept is not None:
        return kept
    spare = _spare.get(device)
    if not spare:
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        zeros = torch.zeros((SPARE_COUNTERS, COUNTERS), dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        spare = _spare[device] = list(zeros.unbind())
    _taken[key] = spare.pop()
    return _taken[key]
