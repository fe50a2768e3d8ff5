"""Times the persistent decode kernel against the same layers as separate Hopper kernels, in CUDA graphs.

    python kernels/bench/hopper_stack.py OUT.json [SHAPE...]

A whole decode step but for embedding and sampling: Qwen3-8B and Qwen3-0.6B shapes, contexts of 2,048 tokens,
random bfloat16 weights and keys made on the device. Roof: bytes of weights, keys and values over the copy
bandwidth measured first.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.numerics.decode_stack import (
    StackInputs,
    StackShape,
    random_inputs,
    random_stack,
    relative_error,
)
from quickturn_kernels.ops.decode_stack.hopper_launch import most_rows

DEVICE = torch.device("cuda")
CONTEXT = 2048
SHAPES = {
    "qwen3-0.6b": StackShape("", (), layers=28, hidden=1024, heads=16, kv_heads=8, inner=3072, vocab=151936),
    "qwen3-8b": StackShape("", (), layers=36, hidden=4096, heads=32, kv_heads=8, inner=12288, vocab=151936),
}


def graph_time(run: Callable[[], Tensor], replays: int = 20, repeats: int = 5) -> float:
    """Microseconds of one replay: the median of a few means."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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
    return 2 * source.numel() * 4e-3 / graph_time(lambda: torch.mul(source, 2.0, out=target), 6)


def step_bytes(stack: kernels.DecoderStack, inputs: StackInputs) -> int:
    """Bytes that a step must read: weights, and the keys and values of every row."""
    matrices = [stack.head, *(m for one in stack.layers for m in (one.qkv, one.o, one.gate_up, one.down))]
    keys = len(stack.layers) * int(inputs.context_lens.sum()) * stack.kv_heads * stack.head_dim * 4
    return sum(matrix.tensors[0].numel() * 2 for matrix in matrices) + keys


def measure(shape: StackShape, roof: float) -> dict[str, object]:
    """One shape at every batch that the kernel takes."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    stack = random_stack(replace(shape, contexts=(CONTEXT,)), generator, DEVICE)
    result: dict[str, object] = {}
    for rows in (1, 2, 4, 8):
        if rows > most_rows(stack):
            break
        inputs = random_inputs(replace(shape, contexts=(CONTEXT,) * rows), generator, DEVICE)
        size = step_bytes(stack, inputs)
        found: dict[str, object] = {"bytes": size, "roof_us": size * 1e-3 / roof}
        outputs = {}
        for name in ("reference", "hopper"):
            with kernels.use(decode_stack=name):
                outputs[name] = inputs.run(stack)
                us = graph_time(lambda: inputs.run(stack))  # noqa: B023
            found["separate" if name == "reference" else "stack"] = {
                "us": us,
                "of_roof": size * 1e-3 / roof / us,
            }
        found["difference"] = relative_error(outputs["reference"], outputs["hopper"])
        found["same_tokens"] = bool((outputs["reference"].argmax(1) == outputs["hopper"].argmax(1)).all())
        result[str(rows)] = found
        print(shape.layers, rows, json.dumps(found), flush=True)
    return result


def main() -> None:
    """Measure and write."""
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(SHAPES)
    roof = copy_bandwidth()
    result: dict[str, object] = {
        "command": f"python kernels/bench/hopper_stack.py OUT.json {' '.join(names)}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "context": CONTEXT,
        "roof_gbs": roof,
    }
    for name in names:
        result[name] = measure(SHAPES[name], roof)
        out.write_text(json.dumps(result, indent=1) + "\n")


main()
