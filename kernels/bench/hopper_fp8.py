"""Times products with fp8 weights on a Hopper GPU: a model's matrices in CUDA graphs, layer after layer.

    python kernels/bench/hopper_fp8.py OUT.json

Few rows: Qwen3-8B's matrices at 1, 8, 32 and 64 rows, bfloat16 x; each matrix in a graph of as many launches
as it has copies (1 GB of copies, so that nothing stays in L2). Microseconds, GB/s of weight bytes, and the
share of the copy rate measured first. `plans` tries other geometries. Many rows: 2,048 and 8,192 rows through
`linear`, split into the quantising of x and the product, in TFLOP/s beside bfloat16's.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

import torch

import quickturn_kernels as kernels
from quickturn_kernels.ops.fp8_linear.hopper_launch import choose, geometry, launch, with_stages
from quickturn_kernels.ops.fp8_linear.hopper_quantize import quantize
from quickturn_kernels.ops.linear import LinearWeight, prepare_fp8_linear
from quickturn_kernels.ops.linear.fp8 import aligned_scales

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
ROWS = (1, 8, 32, 64)
MATRICES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
}
COPIES_BYTES = 1 << 30
TILES = (32, 48, 64, 80, 96, 128, 160, 192)


def main() -> None:
    """Run everything; each part survives the failure of another."""
    result: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_gb_per_second": copy_rate(),
    }
    for name, part in (("few", few), ("plans", plans), ("many", many)):
        try:
            result[name] = part(float(str(result["copy_gb_per_second"])))
        except Exception as error:
            result[name] = repr(error)
        print(name, json.dumps(result[name]), flush=True)
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


def copy_rate() -> float:
    """GB/s of a large device copy, read and write counted."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    taken = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end) * 1e-3)
    return round(2 * source.numel() / statistics.median(taken[2:]) / 1e9, 1)


def graphed(run: Callable[[], object], launches: int, repeats: int = 7) -> float:
    """Median microseconds of one of the `launches` launches that `run` makes, in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times[2:])


def random_weight(features: int, columns: int) -> LinearWeight:
    """Random finite bytes and scales near one."""
    matrix = torch.randint(0, 120, (features, columns), dtype=torch.uint8, device=DEVICE)
    scale = aligned_scales(features, columns, DEVICE)
    scale.uniform_(0.5, 1.5)
    return prepare_fp8_linear(matrix.view(torch.float8_e4m3fn), scale)


def copies(features: int, columns: int) -> list[LinearWeight]:
    """So many weights that they don't stay in L2."""
    return [random_weight(features, columns) for _ in range(max(2, COPIES_BYTES // (features * columns)))]


def few(rate: float) -> dict[str, object]:
    """Each matrix at each number of rows, as the engine would launch it."""
    found: dict[str, object] = {}
    for name, (features, columns) in MATRICES.items():
        weights = copies(features, columns)
        gated = name == "gate_up"
        for rows in ROWS:
            x = torch.randn(rows, columns, dtype=BF16, device=DEVICE)
            op = kernels.linear_silu_and_mul if gated else kernels.linear
            taken = graphed(partial(each, partial(op, x), weights), len(weights))
            found[f"{name} {rows}"] = figure(taken, features * columns, rate) | {
                "plan": asdict(choose(rows, features, columns, gated))
            }
    return found


def each(run: Callable[[LinearWeight], object], weights: list[LinearWeight]) -> None:
    """One launch for each weight."""
    for weight in weights:
        run(weight)


def figure(microseconds: float, size: int, rate: float) -> dict[str, object]:
    """A time as bandwidth."""
    speed = size / microseconds / 1e3
    return {"us": round(microseconds, 2), "gb_per_second": round(speed), "share": round(speed / rate, 3)}


def plans(rate: float) -> dict[str, object]:
    """Other geometries, the best three of each matrix."""
    found: dict[str, object] = {}
    for name, (features, columns) in MATRICES.items():
        weights = copies(features, columns)[:12]
        gated = name == "gate_up"
        for rows in (1, 16, 32, 64):
            x = torch.randn(rows, columns, dtype=BF16, device=DEVICE)
            out = torch.empty(rows, features // 2 if gated else features, dtype=BF16, device=DEVICE)
            tried = []
            for tile_rows, split in product(TILES, (1, 2)):
                base = geometry(features, columns, tile_rows, split)
                if base is None or (gated and tile_rows % 32):
                    continue
                if min(base.blocks, -(-features // tile_rows)) * split < 90:
                    continue
                plan = with_stages(base, rows, out.shape[1], gated)
                run = partial(launch, x, bias=None, out=out, plan=plan, gated=gated)
                taken = graphed(partial(each, run, weights), len(weights), 3)
                tried.append((round(taken, 2), tile_rows, split, plan.stages))
            found[f"{name} {rows}"] = sorted(tried)[:6]
    return found


def many(rate: float) -> dict[str, object]:
    """Prefill: quantising, the product, both, and bfloat16."""
    found: dict[str, object] = {}
    for name, (features, columns) in MATRICES.items():
        weight = random_weight(features, columns)
        by_row = prepare_fp8_linear(
            torch.zeros(features, columns, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn),
            torch.ones(features, device=DEVICE),
        )
        plain = torch.randn(features, columns, dtype=BF16, device=DEVICE)
        for rows in (128, 512, 2048, 8192):
            x = torch.randn(rows, columns, dtype=BF16, device=DEVICE)
            quantized, x_scale = quantize(x, rows, whole=False)
            row_quantized, row_scale = quantize(x, rows, whole=True)
            ways: dict[str, Callable[[], object]] = {
                "quantize": lambda x=x, rows=rows: quantize(x, rows, whole=False),
                "product": lambda q=quantized, s=x_scale, w=weight: torch._scaled_mm(
                    q, w.tensors[0].t(), s, w.tensors[1].t(), out_dtype=BF16
                ),
                "linear": lambda x=x, w=weight: kernels.linear(x, w),
                "rows: quantize": lambda x=x, rows=rows: quantize(x, rows, whole=True),
                "rows: product": lambda q=row_quantized, s=row_scale, w=by_row: torch._scaled_mm(
                    q, w.tensors[0].t(), s, w.tensors[1][None, :], out_dtype=BF16
                ),
                "rows: product, fast": lambda q=row_quantized, s=row_scale, w=by_row: torch._scaled_mm(
                    q, w.tensors[0].t(), s, w.tensors[1][None, :], out_dtype=BF16, use_fast_accum=True
                ),
                "bfloat16": lambda x=x, w=plain: torch.nn.functional.linear(x, w),
            }
            for way, run in ways.items():
                try:
                    taken = graphed(run, 1, 5)
                except Exception as error:
                    found[f"{name} {rows} {way}"] = repr(error)[:300]
                    continue
                tflops = 2 * rows * features * columns / taken / 1e6
                found[f"{name} {rows} {way}"] = {"us": round(taken, 1), "tflops": round(tflops)}
    return found


if __name__ == "__main__":
    main()
