"""Cases of paged attention: ragged, empty and padding rows, group sizes, head dims, windows, sinks,
softcap, strided caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.attention import FP8, SAME, paged_attention_decode, paged_attention_prefill

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Shape:
    """One attention problem. `queries` empty is decode, else the query tokens a row; `padding` more tokens
    follow them.
    """

    name: str
    contexts: Sequence[int]
    queries: Sequence[int] = ()
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_tokens: int = 16
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0
    padding: int = 0
    dtype: torch.dtype = BF16
    fp8: bool = False


DECODE = (
    Shape("ragged", (1, 64, 65, 0, 200), dtype=FP32),
    Shape("one long row", (1100,), block_tokens=64),
    Shape("long beside short", (3, 700, 16, 17), block_tokens=32, dtype=FP16),
    Shape("all padding", (0, 0)),
    Shape("no rows", ()),
    Shape("one head a group", (40, 130), heads=3, kv_heads=3),
    Shape("odd group", (40, 130), heads=10, kv_heads=2),
    Shape("wide group", (90,), heads=32, kv_heads=1, dtype=FP16),
    Shape("dim 128", (130, 20), heads=8, kv_heads=2, head_dim=128, block_tokens=64),
    Shape("dim 256", (70, 33), heads=8, kv_heads=1, head_dim=256, block_tokens=64),
    Shape("window", (5, 300, 129), window=100),
    Shape("window of one", (5, 64, 129), window=1, dtype=FP32),
    Shape("sinks", (5, 0, 300), sinks=True, dtype=FP32),
    Shape("window and sinks", (5, 300), window=64, sinks=True, block_tokens=64),
    Shape("softcap", (50, 100), softcap=20.0, dtype=FP32),
    Shape("dim 24", (50, 100), head_dim=24),
    Shape("dim 80", (50, 100, 0), head_dim=80, block_tokens=64),
    Shape("dim 96", (130,), head_dim=96, dtype=FP32),
    Shape("dim 112", (130,), head_dim=112, heads=8, kv_heads=1),
    Shape("large pages", (700, 0, 64, 129), heads=8, head_dim=128, block_tokens=128),
    Shape("dim 128, window", (700, 3, 200, 129), heads=8, head_dim=128, block_tokens=64, window=70),
    Shape("many rows", tuple(range(0, 400, 9)), heads=8, head_dim=128, block_tokens=64),
    Shape("e4m3", (1, 64, 65, 0, 200, 333), heads=8, fp8=True),
    Shape("e4m3, float32", (1, 64, 65, 0, 200), dtype=FP32, fp8=True),
    Shape("e4m3, float16", (130, 700, 20), heads=8, head_dim=128, block_tokens=64, dtype=FP16, fp8=True),
    Shape("e4m3, dim 256", (70, 33, 500), heads=8, kv_heads=1, head_dim=256, block_tokens=64, fp8=True),
    Shape("e4m3, window", (700, 3, 0, 129), heads=8, head_dim=128, block_tokens=32, window=70, fp8=True),
    Shape("e4m3, dim 80, sinks", (90, 0, 300), head_dim=80, sinks=True, fp8=True),
    Shape("e4m3, long", (2100,), heads=16, kv_heads=1, head_dim=128, block_tokens=64, fp8=True),
)

PREFILL = (
    Shape("one row", (100,), (100,), dtype=FP32),
    Shape("ragged, chunked", (90, 33, 1, 150), (20, 33, 1, 70), dtype=FP16),
    Shape("empty and padding rows", (40, 0, 64, 10), (40, 3, 0, 2), padding=5),
    Shape("no tokens", (0,), (0,)),
    Shape("short chunk, long context", (1100,), (3,), block_tokens=64),
    Shape("several drafts", (700, 31), (4, 4), heads=8, kv_heads=1, dtype=FP32),
    Shape("odd group", (70, 45), (70, 9), heads=10, kv_heads=2),
    Shape("one head a group", (150,), (150,), heads=2, kv_heads=2, block_tokens=64),
    Shape("dim 128, tiles of two blocks", (300,), (200,), heads=4, kv_heads=1, head_dim=128, block_tokens=64),
    Shape("dim 256", (150,), (90,), heads=8, kv_heads=1, head_dim=256, block_tokens=64),
    Shape("window", (300, 90), (130, 90), window=70),
    Shape("window of one", (70,), (70,), window=1, dtype=FP32),
    Shape("window, split", (1300,), (2,), window=1100, block_tokens=64),
    Shape("sinks", (90, 12), (60, 12), sinks=True, dtype=FP32),
    Shape("sinks, split", (1100, 0), (3, 1), sinks=True, block_tokens=32),
    Shape("window and sinks", (300,), (150,), window=33, sinks=True),
    Shape("softcap", (80,), (80,), softcap=20.0),
    Shape("large pages, window, sinks", (400,), (300,), window=150, sinks=True, block_tokens=64),
    Shape("dim 24", (90, 33), (40, 33), head_dim=24),
    Shape("dim 80", (100,), (70,), head_dim=80, block_tokens=64),
    Shape("dim 96, split", (1100,), (3,), head_dim=96, block_tokens=64),
    Shape("dim 112", (130,), (130,), head_dim=112, dtype=FP32),
    Shape("pages of 128", (330, 40), (200, 40), heads=4, kv_heads=1, head_dim=128, block_tokens=128),
    Shape("e4m3", (90, 33, 0, 150), (20, 33, 0, 70), fp8=True),
    Shape("e4m3, float32", (90, 33), (20, 33), dtype=FP32, fp8=True),
    Shape("e4m3, dim 128", (330, 40), (200, 40), head_dim=128, block_tokens=64, window=100, fp8=True),
    Shape("e4m3, long chunks", (700, 90, 0, 300), (300, 90, 0, 260), heads=8, block_tokens=64, fp8=True),
    Shape("e4m3, dim 256, sinks", (200, 130), (150, 130), heads=8, head_dim=256, sinks=True, fp8=True),
    Shape("e4m3, split", (1100,), (3,), head_dim=128, block_tokens=64, dtype=FP16, fp8=True),
)

SCALES = (0.75, 1.5)
"""Of keys and values in e4m3."""


def attention_cases() -> tuple[Case, ...]:
    """Cases of both ops."""
    return tuple(attention_case("paged_attention_decode", shape) for shape in DECODE) + tuple(
        attention_case("paged_attention_prefill", shape) for shape in PREFILL
    )


def attention_case(op: str, shape: Shape) -> Case:
    """The case of one shape; a shape without `queries` is for decode."""
    traits = {
        "head_dim": shape.head_dim,
        "window": shape.window > 0,
        "sinks": shape.sinks,
        "softcap": shape.softcap > 0.0,
        "cache": FP8 if shape.fp8 else SAME,
    }
    return Case(op, shape.name, shape.dtype, traits, partial(_run, op, shape))


def _run(op: str, shape: Shape, generator: Generator, device: torch.device) -> Result:
    k_cache, v_cache, tables = paged_cache(shape, generator, device)
    tokens = sum(shape.queries) + shape.padding if op == "paged_attention_prefill" else len(shape.contexts)
    # A view of a fused projection, as models pass it: the token stride is larger than heads * head_dim.
    fused = torch.randn(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim, generator=generator)
    q = fused.to(shape.dtype).to(device)[:, : shape.heads]
    sinks = torch.randn(shape.heads, generator=generator).to(device) if shape.sinks else None
    lens = torch.tensor(shape.contexts, dtype=torch.int32, device=device)
    scale = shape.head_dim**-0.5
    k_scale, v_scale = SCALES if shape.fp8 else (1.0, 1.0)
    # A loose bound, as that of a captured graph is.
    bound = max(shape.contexts, default=0) + 70
    if op == "paged_attention_decode":
        out = paged_attention_decode(
            q,
            k_cache,
            v_cache,
            tables,
            lens,
            scale,
            window=shape.window,
            sinks=sinks,
            softcap=shape.softcap,
            k_scale=k_scale,
            v_scale=v_scale,
            max_context_len=bound,
        )
        return Result({"out": out})
    ends = torch.tensor((0, *shape.queries)).cumsum(0).to(torch.int32).to(device)
    out = paged_attention_prefill(
        q,
        k_cache,
        v_cache,
        tables,
        ends,
        lens,
        max(shape.queries),
        scale,
        window=shape.window,
        sinks=sinks,
        softcap=shape.softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        max_context_len=bound,
    )
    return Result({"out": out})


def paged_cache(shape: Shape, generator: Generator, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """k_cache, v_cache and tables: blocks in random order, strided as one layer of an arena, NaN wherever
    no key lies.
    """
    counts = [-(-context // shape.block_tokens) for context in shape.contexts]
    total = sum(counts)
    # Block 0 is nobody's: unused table entries point there.
    arena = torch.full((total + 1, 3, 2, shape.block_tokens, shape.kv_heads, shape.head_dim), float("nan"))
    order = (torch.randperm(total, generator=generator) + 1).tolist()
    tables = torch.zeros((len(shape.contexts), max(counts, default=0) + 2), dtype=torch.int32)
    for row, context in enumerate(shape.contexts):
        for index in range(counts[row]):
            block = order.pop()
            tables[row, index] = block
            filled = min(shape.block_tokens, context - index * shape.block_tokens)
            arena[block, 1, :, :filled] = torch.randn(
                2, filled, shape.kv_heads, shape.head_dim, generator=generator
            )
    arena = arena.to(torch.float8_e4m3fn if shape.fp8 else shape.dtype).to(device)
    return arena[:, 1, 0], arena[:, 1, 1], tables.to(device)
