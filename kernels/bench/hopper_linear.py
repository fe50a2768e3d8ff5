"""Times the Hopper few-row linear against cuBLAS: a model's matrices in CUDA graphs, layer after layer.

    python kernels/bench/hopper_linear.py OUT.json

Three views of Qwen3-8B and Qwen3-0.6B shapes at 1, 8, 32 and 64 rows, bfloat16, random weights made on the
device: `cublas` and `ours`, each matrix alone (a graph of one launch a layer), and `step`, the dense half of
a decode step: norms, the four matrices of every layer, the head. Roof: bytes of weights over the copy
bandwidth measured first.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.ops.linear.hopper_launch import Plan, choose, launch
from quickturn_kernels.ops.norm.hopper import add_rms_norm

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1, 8, 32, 64)
EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """A decoder's matrices, [N, K] each; `attended` is the width that attention hands to `o`."""

    name: str
    layers: int
    matrices: dict[str, tuple[int, int]]


def _shape(name: str, layers: int, hidden: int, attended: int, kv: int, inner: int) -> Shape:
    return Shape(
        name,
        layers,
        {
            "qkv": (attended + 2 * kv, hidden),
            "o": (hidden, attended),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (151936, hidden),
        },
    )


SHAPES = (
    _shape("Qwen3-8B", 36, 4096, 4096, 1024, 12288),
    _shape("Qwen3-0.6B", 28, 1024, 2048, 1024, 3072),
)

Change = Callable[[Plan, str], Plan]


def graph_time(run: Callable[[], object], replays: int = 6, repeats: int = 3) -> float:
    """Microseconds of one replay: the median of a few means."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """GB/s of a large copy, bytes read and written."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4e-3 / graph_time(lambda: torch.mul(source, 2.0, out=target))


def make_weights(shape: Shape) -> dict[str, list[Tensor]]:
    """Random weights, one of each matrix a layer, one head."""
    return {
        name: [
            torch.randn(size, device=DEVICE, dtype=BF16).mul_(0.02)
            for _ in range(1 if name == "head" else shape.layers)
        ]
        for name, size in shape.matrices.items()
    }


def unchanged(plan: Plan, name: str) -> Plan:
    """The plan that the ops take."""
    return plan


def product(x: Tensor, weight: Tensor, name: str, change: Change) -> Tensor:
    """One of our products as the ops would do it, under a changed plan."""
    gated = name == "gate_up"
    plan = change(choose(x.shape[0], weight.shape[0], weight.shape[1], gated), name)
    dtype = torch.float32 if name == "head" else BF16
    out = torch.empty(x.shape[0], weight.shape[0] // (2 if gated else 1), device=DEVICE, dtype=dtype)
    launch(x, weight, None, out, plan, gated=gated)
    return out


def step(start: Tensor, residual: Tensor, weights: dict[str, list[Tensor]], change: Change | None) -> Tensor:
    """The dense half of a decode step; the first columns of qkv stand for what attention would return.

    No `change`: cuBLAS and the portable kernels.
    """
    norm = torch.ones(start.shape[1], device=DEVICE, dtype=BF16)
    attended = weights["o"][0].shape[1]

    def apply(x: Tensor, weight: Tensor, name: str) -> Tensor:
        if change is not None:
            return product(x, weight, name, change)
        if name == "gate_up":
            return kernels.silu_and_mul(functional.linear(x, weight))
        return kernels.linear(x, weight, None, torch.float32 if name == "head" else None)

    def normed(x: Tensor) -> Tensor:
        if change is None:
            return kernels.add_rms_norm(x, residual, norm, EPS)
        return add_rms_norm(x, residual, norm, EPS)

    residual.copy_(start)
    x = start
    for qkv, o, gate_up, down in zip(
        *(weights[name] for name in ("qkv", "o", "gate_up", "down")), strict=True
    ):
        x = apply(apply(normed(x), qkv, "qkv")[:, :attended], o, "o")
        x = apply(apply(normed(x), gate_up, "gate_up"), down, "down")
    return apply(normed(x), weights["head"][0], "head")


VARIANTS: dict[str, Change] = {
    "chosen": unchanged,
    "ordinary launches": lambda plan, name: replace(plan, early=False),
    "dependents at the end": lambda plan, name: replace(plan, trigger=0),
}
"""Ways to overlap the kernels of a step."""


def measure(shape: Shape, roof: float) -> dict[str, object]:
    """Every view of one shape."""
    weights = make_weights(shape)
    total = sum(weight.numel() * 2 for layers in weights.values() for weight in layers)
    result: dict[str, dict[str, object]] = {"cublas": {}, "ours": {}, "step": {}}
    for name, layers in weights.items():
        size = layers[0].numel() * 2
        for rows in ROWS:
            x = torch.randn(rows, layers[0].shape[1], device=DEVICE, dtype=BF16)
            library = graph_time(lambda: [functional.linear(x, w) for w in layers]) / len(layers)  # noqa: B023
            ours = graph_time(lambda: [product(x, w, name, unchanged) for w in layers]) / len(layers)  # noqa: B023
            plan = asdict(choose(rows, *shape.matrices[name], name == "gate_up"))
            result["cublas"][f"{name}/{rows}"] = {"us": library, "gbs": size * 1e-3 / library}
            result["ours"][f"{name}/{rows}"] = {"us": ours, "gbs": size * 1e-3 / ours, "plan": plan}
            print(
                f"{shape.name} {name:8} {rows:3} rows  cublas {library:6.2f} us {size * 1e-3 / library:.0f}"
                f"   ours {ours:7.2f} us {size * 1e-3 / ours:6.0f} GB/s",
                flush=True,
            )
    for rows in ROWS:
        start = torch.randn(rows, shape.matrices["qkv"][1], device=DEVICE, dtype=BF16)
        residual = torch.empty_like(start)
        with kernels.use(linear="cublas", add_rms_norm="triton", silu_and_mul="triton"):
            times = {"cublas and triton": graph_time(lambda: step(start, residual, weights, None))}  # noqa: B023
            want = step(start, residual, weights, None)
        reference = step(start, residual, weights, unchanged)
        for label, change in VARIANTS.items():
            times[label] = graph_time(lambda: step(start, residual, weights, change))  # noqa: B023
            if not torch.equal(step(start, residual, weights, change), reference):
                times[label] = float("nan")
        error = float((reference - want).norm() / want.norm())
        result["step"][f"{rows}"] = {
            label: {"us": us, "gbs": total * 1e-3 / us, "of_roof": total * 1e-3 / us / roof}
            for label, us in times.items()
        } | {"error against cublas": error}
        for label, us in times.items():
            share = total * 1e-3 / us / roof
            print(
                f"{shape.name} step {rows:3} rows  {label:47} {us:6.0f} us  {share:.3f} of roof", flush=True
            )
        print(f"{shape.name} step {rows:3} rows  error against cublas {error:.4f}", flush=True)
    return dict(result)


def main() -> None:
    """Measure and write."""
    out = Path(sys.argv[1])
    roof = copy_bandwidth()
    result: dict[str, object] = {
        "command": "python kernels/bench/hopper_linear.py OUT.json",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "roof_gbs": roof,
    }
    for shape in SHAPES:
        result[shape.name] = measure(shape, roof)
        out.write_text(json.dumps(result, indent=1) + "\n")


main()
