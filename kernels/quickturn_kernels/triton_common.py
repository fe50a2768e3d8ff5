"""What the Triton kernels share on the host side."""

import torch
from torch import Tensor

from quickturn_kernels import platform

INTERPRETED = platform.interpreting()
"""Fixed when the first Triton module is imported, as Triton itself fixes it. Kernels then get float32
operands for `tl.dot`: the interpreter multiplies bfloat16 wrongly.
"""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

INTERPRETED_UNITS = 3
"""Multiprocessors that interpreted kernels plan for: few, and odd, so that small tests reach every way of
splitting.
"""

_MIN_COUNTERS = 1 << 16
_counters: dict[tuple[torch.device, int], list[Tensor]] = {}


def next_power_of_two(value: int) -> int:
    """The least power of two that is >= value (1 for 0)."""
    return 1 << max(0, value - 1).bit_length()


def units(device: torch.device) -> int:
    """Multiprocessors to plan for."""
    return INTERPRETED_UNITS if device.type == "cpu" else platform.describe(device).units


def capability(device: torch.device) -> tuple[int, int]:
    """CUDA capability to plan for; the interpreter plans as for Hopper."""
    return (9, 0) if device.type == "cpu" else platform.describe(device).capability


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros, which every kernel that uses them leaves zero again.

    Kept for each stream, so that kernels that may overlap never share them, and never freed, because
    captured graphs keep their address. Graphs that were captured on one stream must not be replayed at the
    same time on two.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        stream = torch.cuda.current_stream(device).cuda_stream
        kept = _counters.get((device, stream))
        if kept is not None and kept[-1].numel() >= count:
            return kept[-1]
        # Zeroing would be captured and not run now, so that these may not be shared with anything outside
        # this graph.
        return torch.zeros(count, dtype=torch.int32, device=device)
    kept = _counters.setdefault((device, torch.cuda.current_stream(device).cuda_stream), [])
    if not kept or kept[-1].numel() < count:
        kept.append(torch.zeros(max(count, _MIN_COUNTERS), dtype=torch.int32, device=device))
    return kept[-1]
