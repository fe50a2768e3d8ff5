"""`python -m quickturn_kernels list`: every op, its implementations, and the one that this machine takes."""

import argparse
import sys
from collections.abc import Sequence

import torch

from quickturn_kernels import platform, registry
from quickturn_kernels.registry import Implementation, Signature

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m quickturn_kernels", epilog="example: python -m quickturn_kernels list --dtype bf16"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="ops, implementations, and which one is taken here (marked *)")
    listing.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="dtype of the calls")
    listing.add_argument("--device", help="torch device, by default the best of this machine")
    chosen = parser.parse_args(arguments)
    print_list(chosen.device, DTYPES[chosen.dtype])
    return 0


def print_list(device_name: str | None, dtype: torch.dtype) -> None:
    """Print the table of ops."""
    device = torch.device(device_name or platform.current().device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    machine = platform.describe(device)
    parts = [machine.name, f"{machine.units} units", f"{machine.memory / 2**30:.1f} GiB"]
    if machine.device == "cuda":
        parts.append("capability {}.{}".format(*machine.capability))
    print(f"{machine.device}: {', '.join(parts)}; calls with {dtype}")
    # Some ops are defined by the tiers themselves.
    registry.load(every_tier=True)
    for op in registry.ops():
        taken = _taken(op, device, dtype)
        print(op)
        for one in registry.implementations(op, every_tier=True):
            mark = "*" if one.name == taken else " "
            print(f"  {mark} {one.name:<14} {one.priority.name:<12} {_describe(one)}")


def _taken(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        return registry.select(op, Signature(device, dtype)).name
    except LookupError:
        return None


def _describe(one: Implementation) -> str:
    parts = [one.platform.device]
    if one.platform.min_capability > (0, 0):
        parts.append("capability >= {}.{}".format(*one.platform.min_capability))
    if one.platform.cpu_features:
        parts.append("needs " + " ".join(sorted(one.platform.cpu_features)))
    if one.dtypes is not None:
        parts.append("dtypes " + " ".join(sorted(str(dtype).removeprefix("torch.") for dtype in one.dtypes)))
    for name, allowed in one.traits.items():
        shown = sorted(allowed, key=str) if isinstance(allowed, frozenset | set) else allowed
        parts.append(f"{name} in {shown}")
    return ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
