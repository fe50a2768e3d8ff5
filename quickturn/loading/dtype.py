"""The dtype that `auto` means."""

from pathlib import Path

import torch

from quickturn.config import DtypeName

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
"""Of x86 (two) and Arm (one): the processor multiplies bfloat16 by itself."""


def resolve_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; `auto` is bfloat16 where `device` is fast at it, else float32."""
    if name != "auto":
        return _NAMES[name]
    return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(_BFLOAT16_FLAGS & _cpu_flags())
    return False


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):
            return set(line.split())
    return set()
