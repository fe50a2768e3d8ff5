"""What this machine can run: processor features, CUDA capability, multiprocessors, memory."""

import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch


@dataclass(frozen=True)
class Platform:
    """One device.

    `device` is its torch device type. `cpu_features` are the flags of /proc/cpuinfo, empty for other
    devices. `capability` is CUDA's (major, minor), (0, 0) elsewhere. `units` counts multiprocessors, or the
    threads torch uses on a CPU. `memory` is in bytes. `shared_memory` is the bytes one thread block may
    use. `interpreter`: Triton kernels are interpreted.
    """

    device: str
    name: str
    cpu_features: frozenset[str] = frozenset()
    capability: tuple[int, int] = (0, 0)
    units: int = 1
    memory: int = 0
    shared_memory: int = 0
    interpreter: bool = False


@dataclass(frozen=True)
class Requirement:
    """What an implementation asks of a platform.

    `device` is a torch device type or "any". `interpretable`: a Triton kernel, which also runs on CPU
    tensors where Triton's interpreter is on, but is then taken only when named, because it's slow.
    """

    device: str = "any"
    min_capability: tuple[int, int] = (0, 0)
    max_capability: tuple[int, int] | None = None
    cpu_features: frozenset[str] = frozenset()
    interpretable: bool = False

    def met_by(self, platform: Platform) -> bool:
        """Whether the implementation may be chosen on this platform."""
        if self.device not in ("any", platform.device):
            return False
        if platform.device == "cuda":
            if platform.capability < self.min_capability:
                return False
            if self.max_capability is not None and platform.capability > self.max_capability:
                return False
        return platform.device != "cpu" or self.cpu_features <= platform.cpu_features

    def runs_on(self, platform: Platform) -> bool:
        """Whether the implementation runs here at all, if only through the interpreter."""
        return self.met_by(platform) or (
            self.interpretable and platform.device == "cpu" and platform.interpreter
        )


ANY = Requirement()
CPU = Requirement(device="cpu")
CUDA = Requirement(device="cuda")
HOPPER = Requirement(device="cuda", min_capability=(9, 0), max_capability=(9, 0))
TRITON = Requirement(device="cuda", min_capability=(8, 0), interpretable=True)
TRITON_FP8 = Requirement(device="cuda", min_capability=(8, 9), interpretable=True)
"""Triton compiles e4m3 from this capability on."""


def has_triton() -> bool:
    """Whether the triton package is installed."""
    return find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton kernels are to be interpreted (TRITON_INTERPRET=1, Triton's own switch)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def interpreter_works() -> bool:
    """Whether Triton's interpreter runs beside this numpy.

    Triton before 3.7 calls int() on arrays of one element, which numpy refuses since 2.4.
    """
    if not has_triton():
        return False
    triton, numpy = (
        tuple(int(part) for part in version(name).split(".")[:2]) for name in ("triton", "numpy")
    )
    return triton >= (3, 7) or numpy < (2, 4)


@cache
def describe(device: torch.device) -> Platform:
    """Describe the platform that a device belongs to."""
    if device.type == "cuda":
        return _describe_cuda(device)
    if device.type == "cpu":
        return _describe_cpu()
    return Platform(device=device.type, name=device.type)


def current() -> Platform:
    """The machine's best device: the current CUDA device, or the CPU."""
    return describe(
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _describe_cuda(device: torch.device) -> Platform:
    properties = torch.cuda.get_device_properties(device)
    return Platform(
        device="cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        units=properties.multi_processor_count,
        memory=properties.total_memory,
        shared_memory=int(getattr(properties, "shared_memory_per_block_optin", 48 << 10)),
    )


def _describe_cpu() -> Platform:
    name, features = "cpu", frozenset[str]()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            if key.strip() in ("flags", "Features"):
                features = frozenset(value.split())
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return Platform(
        device="cpu",
        name=name,
        cpu_features=features,
        units=torch.get_num_threads(),
        memory=memory,
        interpreter=interpreting() and interpreter_works(),
    )
