"""Times products with folded norms and additions against their ops in turn: a model's dense layers in graphs.

    python kernels/bench/hopper_norm_linear.py OUT.json

Shapes of Qwen3-8B, Qwen3-0.6B and the linear attention of Qwen3.5-35B-A3B (no experts), bfloat16, random
weights; some of the layers, more than L2 holds. `ops`: norms (that add) and products in turn. The others have
the norms ahead of the named products inside these, and the products that end a block ahead of such a norm add
to the residual stream themselves; `adds`: all of these do, and no norm is inside. Microseconds a layer; the
results are compared first.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.ops.norm_linear.hopper_launch import launch_norm

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (1, 2, 4)
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A decoder's matrices, [N, K] each. `wide`: its norms' weights are float32."""

    name: str
    layers: int
    matrices: dict[str, tuple[int, int]]
    wide: bool = False


SHAPES = (
    Shape(
        "Qwen3-8B",
        8,
        {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)},
    ),
    Shape(
        "Qwen3-0.6B",
        28,
        {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    ),
    Shape("35B-A3B, no experts", 20, {"qkv": (12352, 2048), "o": (2048, 4096)}, wide=True),
)


@dataclass(frozen=True)
class Layers:
    """The weights of all layers, by matrix, and one norm's."""

    weights: dict[str, list[Tensor]]
    norm: Tensor


def graph_time(run: Callable[[], object], replays: int = 20, repeats: int = 5) -> float:
    """Microseconds of one replay: the median of a few means."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)


def attended(x: Tensor, o: Tensor) -> Tensor:
    """What stands for attention's result: the first columns."""
    return x[:, : o.shape[1]]


def step(start: Tensor, layers: Layers, folds: frozenset[str], adds: bool = False) -> Tensor:
    """A decode step without attention. folds: the products that have their norm inside. adds: every product
    that ends a block adds its result.
    """
    stream, x = start.clone(), torch.zeros_like(start)
    added = False  # x is in the stream

    def block(first: str, last: str, behind: str, at: int) -> None:
        nonlocal x, added
        weight = layers.weights[first][at]
        if first in folds and added:
            made = normed(stream, layers, weight, first == "gate_up")
        else:
            if added:
                x = kernels.rms_norm(stream, layers.norm, EPS)
            else:
                x = kernels.add_rms_norm(x, stream, layers.norm, EPS)
            gated = first == "gate_up"
            made = kernels.linear_silu_and_mul(x, weight) if gated else kernels.linear(x, weight)
        weight = layers.weights[last][at]
        x, added = attended(made, weight), adds or behind in folds
        if added:
            kernels.linear_add(x, weight, None, stream)
        else:
            x = kernels.linear(x, weight)

    for at in range(len(layers.weights["o"])):
        if "down" in layers.weights:
            block("qkv", "o", "gate_up", at)
            block("gate_up", "down", "qkv", at)
        else:
            block("qkv", "o", "qkv", at)
    return stream if added else stream.add_(x)


def normed(x: Tensor, layers: Layers, weight: Tensor, gated: bool) -> Tensor:
    """A product with its norm inside."""
    width = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(x.shape[0], width, device=DEVICE, dtype=BF16)
    launch_norm(x, layers.norm, EPS, weight, None, out, gated=gated)
    return out


STEPS: dict[str, tuple[frozenset[str], bool]] = {
    "ops": (frozenset(), False),
    "adds": (frozenset(), True),
    "qkv": (frozenset({"qkv"}), False),
    "gate_up": (frozenset({"gate_up"}), False),
    "qkv, gate_up": (frozenset({"qkv", "gate_up"}), False),
}


def pair(name: str, start: Tensor, layers: Layers, folded: bool) -> Tensor:
    """One norm with its product, over all layers."""
    gated = name == "gate_up"
    out = start
    for weight in layers.weights[name]:
        if folded:
            out = normed(start, layers, weight, gated)
        else:
            x = kernels.rms_norm(start, layers.norm, EPS)
            out = kernels.linear_silu_and_mul(x, weight) if gated else kernels.linear(x, weight)
    return out


def measure(shape: Shape) -> dict[str, dict[str, float]]:
    """Microseconds a layer, by what is timed and the number of rows."""
    dtype = torch.float32 if shape.wide else BF16
    layers = Layers(
        {
            name: [torch.randn(size, device=DEVICE, dtype=BF16).mul_(0.02) for _ in range(shape.layers)]
            for name, size in shape.matrices.items()
        },
        torch.ones(shape.matrices["qkv"][1], device=DEVICE, dtype=dtype),
    )
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        start = torch.randn(rows, layers.norm.shape[0], device=DEVICE, dtype=BF16)
        want = step(start, layers, *STEPS["ops"])
        for label, form in STEPS.items():
            if "gate_up" in form[0] and "gate_up" not in layers.weights:
                continue
            same = torch.equal(step(start, layers, *form), want)
            time = graph_time(lambda: step(start, layers, *form)) / shape.layers  # noqa: B023
            found.setdefault(label, {})[f"{rows}"] = time if same else float("nan")
            print(f"{shape.name} {rows} rows  {label:18} {time:7.2f} us  same bits {same}", flush=True)
        for name in [name for name in ("qkv", "gate_up") if name in layers.weights]:
            for label, folded in (("ops", False), ("folded", True)):
                time = graph_time(lambda: pair(name, start, layers, folded)) / shape.layers  # noqa: B023
                found.setdefault(f"norm + {name}: {label}", {})[f"{rows}"] = time
                print(f"{shape.name} {rows} rows  norm + {name:8} {label:9} {time:7.2f} us", flush=True)
    return found


def main() -> None:
    """Measure and write."""
    out = Path(sys.argv[1])
    result: dict[str, object] = {
        "command": "python kernels/bench/hopper_norm_linear.py OUT.json",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for shape in SHAPES:
        result[shape.name] = measure(shape)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
