"""Times prefill attention on Hopper: the Triton kernel, ours, and PyTorch's own where it has the same job.

    python kernels/bench/hopper_prefill.py OUT.json [--forms hopper,sdpa] [--sweep]

Whole prompts, and turns of an agent: a few hundred new tokens over a long context. Every call reads a cache
of its own, up to eight, so that short contexts don't lie in L2. Each result is compared with the reference
(a sample of its rows) before it is timed. FLOPs are those of the visible (query, key) pairs; percent is of
989 TFLOP/s, the datasheet's rate.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import quickturn_kernels as kernels
from quickturn_kernels import registry
from quickturn_kernels.ops.attention.hopper_prefill_launch import launch

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
BLOCK_TOKENS = 64
CACHE_BYTES = 8 << 30
MAX_CACHES = 8
PEAK = 989e12
MIN_REPEATS, MAX_REPEATS, REPEAT_SECONDS = 3, 15, 0.05


@dataclass(frozen=True)
class Shape:
    """Heads, and the rows' new tokens and contexts."""

    heads: int
    kv_heads: int
    head_dim: int
    queries: tuple[int, ...]
    contexts: tuple[int, ...]
    window: int = 0

    @property
    def flops(self) -> int:
        """Two products over the visible pairs."""
        pairs = 0
        for queries, context in zip(self.queries, self.contexts, strict=True):
            before = context - queries
            for token in (0, queries - 1) if self.window == 0 else range(queries):
                seen = before + token + 1
                pairs += min(seen, self.window) if self.window else seen * queries // 2
        return 4 * self.heads * self.head_dim * pairs


QWEN3_8B = partial(Shape, 32, 8, 128)
QWEN35 = partial(Shape, 16, 2, 256)
GPT_OSS = partial(Shape, 64, 8, 64)
SHAPES = (
    *(QWEN3_8B((n,), (n,)) for n in (2048, 8192, 32768)),
    QWEN3_8B((2048,) * 4, (2048,) * 4),
    QWEN3_8B((2048,), (8192,)),
    *(QWEN3_8B((n,), (32768,)) for n in (64, 300)),
    QWEN3_8B((720,), (104644,)),
    QWEN3_8B((300,) * 8, (32768,) * 8),
    QWEN3_8B((4096, 100, 700, 30), (4096, 9000, 20000, 500)),
    *(QWEN35((n,), (n,)) for n in (2048, 8192, 32768)),
    QWEN35((300,), (32768,)),
    GPT_OSS((8192,), (8192,)),
    GPT_OSS((8192,), (8192,), 128),
)


class Problem:
    """The inputs of one shape."""

    def __init__(self, shape: Shape) -> None:
        """Random values; blocks in random order."""
        self.shape = shape
        width = -(-max(shape.contexts) // BLOCK_TOKENS)
        rows = len(shape.contexts)
        block = (BLOCK_TOKENS, shape.kv_heads, shape.head_dim)
        size = rows * width * 2 * BLOCK_TOKENS * shape.kv_heads * shape.head_dim * 2
        self.count = max(1, min(MAX_CACHES, CACHE_BYTES // size))
        self.cache = torch.randn((rows * width, self.count, 2, *block), device=DEVICE, dtype=BF16)
        self.tables = torch.randperm(rows * width, device=DEVICE).to(torch.int32).view(rows, width)
        self.starts = torch.tensor((0, *shape.queries), device=DEVICE).cumsum(0).to(torch.int32)
        self.lens = torch.tensor(shape.contexts, device=DEVICE, dtype=torch.int32)
        heads = shape.heads + 2 * shape.kv_heads
        fused = torch.randn((sum(shape.queries), heads, shape.head_dim), device=DEVICE, dtype=BF16)
        self.q = fused[:, : shape.heads]
        self.scale = shape.head_dim**-0.5

    def call(self, index: int) -> Tensor:
        """The public op over cache `index`."""
        shape = self.shape
        return kernels.paged_attention_prefill(
            self.q,
            self.cache[:, index, 0],
            self.cache[:, index, 1],
            self.tables,
            self.starts,
            self.lens,
            max(shape.queries),
            self.scale,
            window=shape.window,
            max_context_len=max(shape.contexts),
        )

    def cut(self, rounds: int, least_piece: int, index: int) -> Tensor:
        """Our kernel with another cut of the work."""
        return launch(
            self.q,
            self.cache[:, index, 0],
            self.cache[:, index, 1],
            self.tables,
            self.starts,
            self.lens,
            self.scale,
            self.shape.window,
            None,
            max(self.shape.contexts),
            rounds=rounds,
            least_piece=least_piece,
        )

    def sdpa(self) -> Callable[[int], Tensor] | None:
        """PyTorch's attention over keys that lie as it likes them; for whole prompts of one length."""
        shape = self.shape
        if shape.window or shape.queries != shape.contexts or len(set(shape.queries)) > 1:
            return None
        rows, length = len(shape.queries), shape.queries[0]
        q = self.q.reshape(rows, length, shape.heads, shape.head_dim).transpose(1, 2)
        k, v = (
            torch.randn((rows, shape.kv_heads, length, shape.head_dim), device=DEVICE, dtype=BF16)
            for _ in range(2)
        )
        return lambda _: scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
        )

    def error(self, out: Tensor) -> float:
        """Relative error of some tokens' results, in the norm, against float32."""
        shape, worst = self.shape, 0.0
        group = shape.heads // shape.kv_heads
        for row, (queries, context) in enumerate(zip(shape.queries, shape.contexts, strict=True)):
            blocks = self.tables[row, : -(-context // BLOCK_TOKENS)].long()
            k, v = (
                self.cache[blocks, 0, part].flatten(0, 1)[:context].float().repeat_interleave(group, 1)
                for part in (0, 1)
            )
            start = int(self.starts[row])
            for token in {0, queries // 3, queries - 1}:
                position = context - queries + token
                oldest = max(0, position + 1 - shape.window) if shape.window else 0
                seen = slice(oldest, position + 1)
                scores = torch.einsum("hd,khd->hk", self.q[start + token].float(), k[seen]) * self.scale
                want = torch.einsum("hk,khd->hd", scores.softmax(1), v[seen])
                got = out[start + token].float()
                worst = max(worst, float((got - want).norm() / want.norm()))
        return worst


def timed(run: Callable[[int], Tensor], count: int) -> float:
    """Median milliseconds of one call, each over the next cache."""
    taken: list[float] = []
    run(0)
    while len(taken) < MIN_REPEATS or (sum(taken) < REPEAT_SECONDS * 1e3 and len(taken) < MAX_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(200_000)  # the host gets ahead
        start.record()
        run(len(taken) % count)
        end.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def measure(shape: Shape, forms: Sequence[str], sweep: bool) -> dict[str, object]:
    """Every form of one shape: milliseconds, TFLOP/s, percent of the datasheet's rate."""
    problem = Problem(shape)
    result: dict[str, object] = {"shape": asdict(shape)}

    def note(form: str, run: Callable[[int], Tensor]) -> None:
        took = timed(run, problem.count)
        rate = shape.flops / took / 1e9
        result[form] = {
            "ms": round(took, 4),
            "tflops": round(rate, 1),
            "percent": round(rate * 1e14 / PEAK, 1),
        }

    for form in forms:
        if form == "sdpa":
            continue
        with registry.use(paged_attention_prefill=form):
            result[f"{form}_error"] = round(problem.error(problem.call(0)), 5)
            note(form, problem.call)
    sdpa = problem.sdpa() if "sdpa" in forms else None
    if sdpa is not None:
        note("sdpa", sdpa)
    if sweep:
        for rounds in (1, 2, 4, 8):
            for least in (2, 4, 8):
                note(f"rounds {rounds}, least {least}", partial(problem.cut, rounds, least))
    return result


def main() -> None:
    """Measure all shapes and write the file named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--forms", default="triton,hopper,sdpa", help="which to measure")
    parser.add_argument("--sweep", action="store_true", help="other cuts of the work, too")
    chosen = parser.parse_args()
    results: list[dict[str, object]] = []
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "prefill": results}
    for shape in SHAPES:
        try:
            results.append(measure(shape, chosen.forms.split(","), chosen.sweep))
        except RuntimeError as error:
            results.append({"shape": asdict(shape), "failed": str(error)[:400]})
        print(json.dumps(results[-1]), flush=True)
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
