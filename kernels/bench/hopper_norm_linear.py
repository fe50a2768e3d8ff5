"""Times products with folded norms and additions against their ops in turn: a model's dense layers in graphs.

    python kernels/bench/hopper_norm_linear.py OUT.json

Shapes of Qwen3-8B, Qwen3-0.6B and the linear attention of Qwen3.5-35B-A3B (no experts), bfloat16, random
weights; some of the layers, more than L2 holds. For each number of rows: `ops` (norm, product), and the
folded forms: `stream` adds every product to the residual stream in its epilogue, `branch` leaves the
attention's to the products behind it. `swizzled` and `compact` are the two layouts of normed rows in shared
memory. Microseconds a layer; the results are compared first.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.ops.norm_linear.hopper_launch import SWIZZLED, launch_norm

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
ROWS = (1, 2, 4, 8)
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


Step = Callable[[Tensor, Layers], Tensor]


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


def ops_step(start: Tensor, layers: Layers) -> Tensor:
    """Norms and products in turn, as a model runs them without the folded ops."""
    stream, x = start.clone(), torch.zeros_like(start)
    for at, o in enumerate(layers.weights["o"]):
        x = kernels.add_rms_norm(x, stream, layers.norm, EPS)
        x = kernels.linear(attended(kernels.linear(x, layers.weights["qkv"][at]), o), o)
        if "down" in layers.weights:
            x = kernels.add_rms_norm(x, stream, layers.norm, EPS)
            x = kernels.linear_silu_and_mul(x, layers.weights["gate_up"][at])
            x = kernels.linear(x, layers.weights["down"][at])
    return stream.add_(x)


def normed(
    stream: Tensor, branch: Tensor | None, layers: Layers, weight: Tensor, pitch: int | None, gated: bool
) -> Tensor:
    """A folded norm under one of the layouts."""
    width = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(stream.shape[0], width, device=DEVICE, dtype=BF16)
    launch_norm(stream, branch, layers.norm, EPS, weight, None, out, gated=gated, pitch=pitch)
    return out


def folded_step(start: Tensor, layers: Layers, *, pitch: int | None, branches: bool) -> Tensor:
    """The same, folded."""
    stream = start.clone()
    for at, o in enumerate(layers.weights["o"]):
        x = attended(normed(stream, None, layers, layers.weights["qkv"][at], pitch, False), o)
        branch = None
        if branches and "down" in layers.weights:
            branch = kernels.linear(x, o)
        else:
            kernels.linear_add(x, o, None, stream, None)
        if "down" in layers.weights:
            x = normed(stream, branch, layers, layers.weights["gate_up"][at], pitch, True)
            kernels.linear_add(x, layers.weights["down"][at], None, stream, branch)
    return stream


STEPS: dict[str, Step] = {
    "ops": ops_step,
    "stream, compact": partial(folded_step, pitch=None, branches=False),
    "stream, swizzled": partial(folded_step, pitch=SWIZZLED, branches=False),
    "branch, compact": partial(folded_step, pitch=None, branches=True),
}


def pair(name: str, start: Tensor, layers: Layers, pitch: int | None, folded: bool) -> Tensor:
    """One norm with its product, over all layers."""
    gated = name == "gate_up"
    out = start
    for weight in layers.weights[name]:
        if folded:
            out = normed(start, None, layers, weight, pitch, gated)
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
        want = ops_step(start, layers)
        for label, step in STEPS.items():
            same = torch.equal(step(start, layers), want)
            time = graph_time(lambda: step(start, layers)) / shape.layers  # noqa: B023
            found.setdefault(label, {})[f"{rows}"] = time if same else float("nan")
            print(
                f"{shape.name} {rows} rows  {label:18} {time:7.2f} us a layer  same bits {same}", flush=True
            )
        for name in ("qkv", "gate_up"):
            if name not in layers.weights:
                continue
            for label, pitch, folded in (
                ("ops", None, False),
                ("compact", None, True),
                ("swizzled", SWIZZLED, True),
            ):
                time = graph_time(lambda: pair(name, start, layers, pitch, folded)) / shape.layers  # noqa: B023
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


main()
