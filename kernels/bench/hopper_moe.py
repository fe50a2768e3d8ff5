"""Times mixtures of experts at the shape of Qwen3.5-35B-A3B: 256 experts, top 8, H 2048, I 512, one shared.

    python kernels/bench/hopper_moe.py OUT.json [IMPLEMENTATION]

CUDA graphs over several layers' weights, so that nothing stays in L2; random bfloat16 weights and logits,
made on the device. `moe` is given the choice, `block` begins with the router's product, `stream` with the
norm ahead of it. Every result but the last is compared with the reference first. Bytes: the chosen experts'
weights, once. Roof: those bytes over the copy bandwidth, or the products' operations over the rate of a large
bfloat16 product, whichever is more.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import registry
from quickturn_kernels.ops.moe import ExpertWeights, SharedExpert

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HIDDEN, INNER, EXPERTS, TOP = 2048, 512, 256, 8
LAYERS = 4
COMPOSED = {"moe_block": "reference", "moe": "triton"}
TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    router: kernels.Router
    experts: ExpertWeights
    shared: SharedExpert


def random(*shape: int) -> Tensor:
    """Values of a matrix that keeps the size of what it multiplies."""
    return torch.randn(shape, device=DEVICE, dtype=BF16).mul_(shape[-1] ** -0.5)


def make_layer() -> Layer:
    """Random weights."""
    return Layer(
        kernels.Router(kernels.prepare_linear(random(EXPERTS, HIDDEN)), kernels.Routing(TOP)),
        kernels.prepare_experts(random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER)),
        kernels.prepare_shared_expert(random(2 * INNER, HIDDEN), random(HIDDEN, INNER), random(1, HIDDEN)),
    )


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 4, repeats: int = 5) -> float:
    """Microseconds a call: the median of a few means over a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
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
        times.append(begin.elapsed_time(end) * 1000 / replays / len(calls))
    return statistics.median(times)


def roofs() -> tuple[float, float]:
    """Bytes/us that a large copy reads and writes, FLOP/us of a large bfloat16 product."""
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    copying = graph_time([lambda: torch.mul(source, 2.0, out=target)])
    left, right = random(8192, 8192), random(8192, 8192)
    return 8 * source.numel() / copying, 2 * 8192**3 / graph_time([lambda: left @ right])


def off(got: Tensor, want: Tensor) -> float:
    """The worst row's relative error."""
    return float(((got.float() - want.float()).norm(dim=1) / want.float().norm(dim=1)).max())


def measure(
    tokens: int, layers: list[Layer], names: Sequence[str], roof: tuple[float, float]
) -> dict[str, object]:
    """Every implementation that takes so many tokens, as microseconds a layer."""
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=BF16)
    choices = [kernels.route(torch.randn(tokens, EXPERTS, device=DEVICE), TOP) for _ in layers]
    used = statistics.mean(len(torch.unique(chosen)) for _, chosen in choices)
    moved = (used + 1) * 3 * HIDDEN * INNER * 2
    flops = 2 * 3 * HIDDEN * INNER * tokens * (TOP + 1)
    least = max(moved / roof[0], flops / roof[1])
    found: dict[str, object] = {"experts": used, "bytes": moved, "flops": flops, "roof_us": least}
    with kernels.use(moe="reference", moe_block="reference", route="reference"):
        want = kernels.moe(x, layers[0].experts, *choices[0], shared=layers[0].shared)
        want_block = kernels.moe_block(x, layers[0].router, layers[0].experts, shared=layers[0].shared)
    for name in names:
        try:
            with kernels.use(moe=name):
                error = off(kernels.moe(x, layers[0].experts, *choices[0], shared=layers[0].shared), want)
                us = graph_time(
                    [
                        lambda layer=layer, choice=choice: kernels.moe(  # type: ignore[misc]
                            x, layer.experts, *choice, shared=layer.shared
                        )
                        for layer, choice in zip(layers, choices, strict=True)
                    ]
                )
            found[f"moe {name}"] = {"us": us, "of_roof": least / us, "error": error}
        except (ValueError, RuntimeError, LookupError) as problem:
            found[f"moe {name}"] = str(problem)[:200]
    for name in ("composed", *names):
        try:
            if name != "composed" and name not in registry.ops()["moe_block"].implementations:
                continue
            with kernels.use(**COMPOSED if name == "composed" else {"moe_block": name}):
                error = off(
                    kernels.moe_block(x, layers[0].router, layers[0].experts, shared=layers[0].shared),
                    want_block,
                )
                us = graph_time(
                    [
                        lambda layer=layer: kernels.moe_block(
                            x, layer.router, layer.experts, shared=layer.shared
                        )  # type: ignore[misc]
                        for layer in layers
                    ]
                )
            found[f"block {name}"] = {"us": us, "of_roof": least / us, "error": error}
        except (ValueError, RuntimeError, LookupError) as problem:
            found[f"block {name}"] = str(problem)[:200]
    if tokens <= kernels.residual_moe_rows(layers[0].router, layers[0].experts, layers[0].shared):
        found |= measure_stream(x, layers, least)
    return found


def measure_stream(x: Tensor, layers: list[Layer], least: float) -> dict[str, object]:
    """A layer on the residual stream as one op, and with its norm as a kernel of its own; in the second the
    result isn't added, which the next norm would do.
    """
    residual, norm = torch.randn_like(x), torch.ones(HIDDEN, device=DEVICE, dtype=BF16)
    branch = torch.zeros_like(x)

    def apart(layer: Layer) -> object:
        normed = kernels.add_rms_norm(branch, residual, norm, 1e-6)
        return kernels.moe_block(normed, layer.router, layer.experts, shared=layer.shared)

    def whole(layer: Layer) -> object:
        return kernels.residual_moe_block(
            residual, branch, norm, 1e-6, layer.router, layer.experts, shared=layer.shared
        )

    with kernels.use(**COMPOSED):
        composed = graph_time([partial(apart, layer) for layer in layers])
    return {
        "stream composed": {"us": composed, "of_roof": least / composed},
        "stream norm apart": {"us": graph_time([partial(apart, layer) for layer in layers])},
        "stream hopper": {
            "us": (us := graph_time([partial(whole, layer) for layer in layers])),
            "of_roof": least / us,
        },
    }


def main() -> None:
    """Measure and write."""
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    roof = roofs()
    result: dict[str, object] = {
        "command": "python kernels/bench/hopper_moe.py OUT.json",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gbs": roof[0] / 1e3,
        "product_tflops": roof[1] / 1e6,
    }
    layers = [make_layer() for _ in range(LAYERS)]
    kernels.load(every_tier=True)
    names = sys.argv[2:] or [
        name for name in registry.ops()["moe"].implementations if name not in ("reference", "cpu")
    ]
    for tokens in TOKENS:
        result[f"{tokens} tokens"] = found = measure(tokens, layers, names, roof)
        print(tokens, json.dumps(found), flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
