"""One forward pass of a SmolLM2-135M-shaped model with random weights: through the ops, and in plain torch.

    python kernels/bench/cpu_step.py [--dtype bfloat16] [--quantize int8] [--runs 7] [--case decode1 ...]

Prints for every case the best and the median time of a step and tokens/s at the best. Threads: torch's
default, or OMP_NUM_THREADS.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.ops.linear import Quantization

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 30, 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
BLOCK_TOKENS = 64
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """rows requests with `queries` new tokens each, the last of them at position context - 1."""

    rows: int
    queries: int
    context: int


CASES = {
    "decode1": Case(1, 1, 512),
    "decode8": Case(8, 1, 512),
    "prefill512": Case(1, 512, 512),
    "prefill2048": Case(1, 2048, 2048),
}


@dataclass(frozen=True)
class Layer:
    """One decoder layer's matrices, as they came."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    second_norm: Tensor


def make_layers(dtype: torch.dtype) -> list[Layer]:
    """Random weights of the size of trained ones."""

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).to(dtype)

    return [
        Layer(
            matrix(QKV, HIDDEN),
            matrix(HIDDEN, HEADS * HEAD_DIM),
            matrix(2 * INTERMEDIATE, HIDDEN),
            matrix(HIDDEN, INTERMEDIATE),
            torch.ones(HIDDEN, dtype=dtype),
            torch.ones(HIDDEN, dtype=dtype),
        )
        for _ in range(LAYERS)
    ]


def ops_step(
    case: Case, layers: list[Layer], table: Tensor, dtype: torch.dtype, quantize: Quantization | None
) -> Callable[[], Tensor]:
    """The step through the ops, over a paged cache."""

    def prepare(weight: Tensor) -> kernels.LinearWeight:
        return kernels.prepare_linear(weight, quantize=quantize)

    prepared = [
        tuple(prepare(weight) for weight in (layer.qkv, layer.output, layer.gate_up, layer.down))
        for layer in layers
    ]
    head = prepare(table)
    per_row = -(-case.context // BLOCK_TOKENS)
    blocks = case.rows * per_row
    arena = torch.randn(blocks, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM).to(dtype)
    tables = torch.randperm(blocks).int().reshape(case.rows, per_row)
    tokens = case.rows * case.queries
    ids = torch.randint(0, VOCABULARY, (tokens,))
    positions = torch.arange(case.context - case.queries, case.context).repeat(case.rows)
    owners = torch.arange(case.rows).repeat_interleave(case.queries)
    slots = tables[owners, positions // BLOCK_TOKENS].long() * BLOCK_TOKENS + positions % BLOCK_TOKENS
    contexts = torch.full((case.rows,), case.context, dtype=torch.int32)
    start = torch.arange(0, tokens + 1, case.queries, dtype=torch.int32)
    angles = torch.outer(torch.arange(case.context), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    last = start[1:].long() - 1
    scale = HEAD_DIM**-0.5
    greedy = torch.zeros(case.rows)
    params = kernels.SamplingTensors(greedy, greedy, greedy, greedy, greedy, greedy, all_greedy=True)

    def run() -> Tensor:
        residual = kernels.embedding(ids, head)
        x = kernels.rms_norm(residual, layers[0].norm, EPS)
        for index, (layer, (qkv, output, gate_up, down)) in enumerate(zip(layers, prepared, strict=True)):
            if index > 0:
                x = kernels.add_rms_norm(x, residual, layer.norm, EPS)
            q, k, v = (
                kernels.linear(x, qkv).view(tokens, -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            )
            k_cache, v_cache = arena[:, index, 0], arena[:, index, 1]
            kernels.rotary_cache_write(q, k, v, positions, cos_sin, k_cache, v_cache, slots)
            if case.queries == 1:
                attended = kernels.paged_attention_decode(
                    q, k_cache, v_cache, tables, contexts, scale, max_context_len=case.context
                )
            else:
                attended = kernels.paged_attention_prefill(
                    q,
                    k_cache,
                    v_cache,
                    tables,
                    start,
                    contexts,
                    case.queries,
                    scale,
                    max_context_len=case.context,
                )
            x = kernels.linear(attended.view(tokens, -1), output)
            x = kernels.add_rms_norm(x, residual, layer.second_norm, EPS)
            x = kernels.linear(kernels.silu_and_mul(kernels.linear(x, gate_up)), down)
        x = kernels.add_rms_norm(x, residual, layers[0].norm, EPS)
        logits = kernels.linear(x if case.queries == 1 else x[last], head, None, torch.float32)
        return kernels.sample(logits, params).tokens

    return run


def torch_step(case: Case, layers: list[Layer], table: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """The step through torch's own functions, over a contiguous cache."""
    cache = torch.randn(LAYERS, 2, case.rows, KV_HEADS, case.context, HEAD_DIM).to(dtype)
    ids = torch.randint(0, VOCABULARY, (case.rows, case.queries))
    first = case.context - case.queries
    angles = torch.outer(
        torch.arange(first, case.context), 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    )
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))

    def rotate(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def run() -> Tensor:
        x = functional.embedding(ids, table)
        for index, layer in enumerate(layers):
            y = functional.rms_norm(x, (HIDDEN,), layer.norm, EPS)
            y = functional.linear(y, layer.qkv).view(case.rows, case.queries, -1, HEAD_DIM).transpose(1, 2)
            q, k, v = y.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            keys, values = cache[index]
            keys[:, :, first:] = rotate(k)
            values[:, :, first:] = v
            y = functional.scaled_dot_product_attention(
                rotate(q), keys, values, is_causal=case.queries > 1, enable_gqa=True
            )
            x = x + functional.linear(y.transpose(1, 2).flatten(2), layer.output)
            y = functional.rms_norm(x, (HIDDEN,), layer.second_norm, EPS)
            gate, up = functional.linear(y, layer.gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        x = functional.rms_norm(x[:, -1], (HIDDEN,), layers[0].norm, EPS)
        return functional.linear(x, table).argmax(-1)

    return run


def measure(run: Callable[[], Tensor], runs: int) -> tuple[float, float]:
    """Best and median seconds."""
    run()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--quantize", choices=["int8", "int4"])
    parser.add_argument("--only", choices=["ops", "torch"])
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    layers = make_layers(dtype)
    table = (torch.randn(VOCABULARY, HIDDEN) * HIDDEN**-0.5).to(dtype)
    for name in arguments.case:
        case = CASES[name]
        for kind in ("ops", "torch"):
            if arguments.only not in (None, kind):
                continue
            if kind == "ops":
                run = ops_step(case, layers, table, dtype, arguments.quantize)
            else:
                run = torch_step(case, layers, table, dtype)
            with torch.inference_mode():
                best, median = measure(run, arguments.runs * (10 if case.queries == 1 else 1))
            tokens = case.rows * case.queries
            print(
                f"{name:12} {kind:6} best {best * 1e3:8.2f} ms  median {median * 1e3:8.2f} ms  "
                f"{tokens / best:8.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
