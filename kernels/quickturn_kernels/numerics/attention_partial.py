"""Cases of partial attention: over the keys here, and parts put together, sinks and rows without keys among
them.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.attention import BF16, FP16, FP32, SCALES, Shape, paged_cache
from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.ops.attention_partial import merge_attention, partial_attention_decode

DECODE = (
    Shape("ragged", (1, 64, 65, 0, 200), dtype=FP32),
    Shape("long beside short", (3, 700, 16, 17), block_tokens=32, dtype=FP16),
    Shape("all padding", (0, 0)),
    Shape("no rows", ()),
    Shape("odd group", (40, 130, 900), heads=10, kv_heads=2),
    Shape("wide group", (90, 1100), heads=32, kv_heads=1, dtype=FP16),
    Shape("dim 128", (130, 2000, 0), heads=8, kv_heads=2, head_dim=128, block_tokens=32),
    Shape("dim 256", (70, 33), heads=8, kv_heads=1, head_dim=256, block_tokens=64),
    Shape("softcap", (50, 100), softcap=20.0, dtype=FP32),
    Shape("dim 80", (50, 400, 0), head_dim=80, block_tokens=64),
    Shape("e4m3", (1, 64, 65, 0, 500), heads=8, fp8=True),
)


@dataclass(frozen=True)
class Parts:
    """Parts to be put together, of so many rows and heads."""

    name: str
    count: int
    rows: int
    heads: int = 4
    dim: int = 64
    sinks: bool = False
    dtype: torch.dtype = FP32


MERGES = (
    Parts("two parts", 2, 5),
    Parts("one part", 1, 3, dtype=BF16),
    Parts("four parts, sinks", 4, 7, 8, 128, sinks=True, dtype=BF16),
    Parts("eight parts, dim 80", 8, 3, 5, 80, dtype=FP16),
    Parts("sinks", 3, 4, 2, 256, sinks=True),
    Parts("no rows", 2, 0, sinks=True),
)


def attention_partial_cases() -> tuple[Case, ...]:
    """Cases of both ops."""
    return (
        *(
            Case("partial_attention_decode", shape.name, shape.dtype, _traits(shape), partial(_decode, shape))
            for shape in DECODE
        ),
        *(Case("merge_attention", parts.name, parts.dtype, {}, partial(_merge, parts)) for parts in MERGES),
    )


def _traits(shape: Shape) -> dict[str, object]:
    return {
        "head_dim": shape.head_dim,
        "softcap": shape.softcap > 0.0,
        "cache": FP8 if shape.fp8 else SAME,
    }


def _decode(shape: Shape, generator: Generator, device: torch.device) -> Result:
    k_cache, v_cache, tables = paged_cache(shape, generator, device)
    rows = len(shape.contexts)
    fused = torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.head_dim, generator=generator)
    k_scale, v_scale = SCALES if shape.fp8 else (1.0, 1.0)
    out = partial_attention_decode(
        fused.to(shape.dtype).to(device)[:, : shape.heads],
        k_cache,
        v_cache,
        tables,
        torch.tensor(shape.contexts, dtype=torch.int32, device=device),
        shape.head_dim**-0.5,
        softcap=shape.softcap,
        k_scale=k_scale,
        v_scale=v_scale,
        max_context_len=max(shape.contexts, default=0) + 70,
    )
    # Compared apart: results are rounded as q is, logarithms are of float32 sums. -inf equals itself only.
    log = out[..., -1]
    seen = log > float("-inf")
    return Result(
        {
            "out": out[..., :-1].to(shape.dtype),
            "log": torch.where(seen, log, 0.0).to(shape.dtype),
            "seen": seen,
        }
    )


def _merge(of: Parts, generator: Generator, device: torch.device) -> Result:
    parts = torch.randn(of.count, of.rows, of.heads, of.dim + 1, generator=generator)
    parts[..., -1] *= 5
    # A row without keys in the first part, and one that has none at all.
    for part, row in ((0, 1), *((part, 2) for part in range(of.count))):
        if row < of.rows:
            parts[part, row, :, :-1] = 0.0
            parts[part, row, :, -1] = float("-inf")
    sinks: Tensor | None = torch.randn(of.heads, generator=generator).to(device) if of.sinks else None
    return Result({"out": merge_attention(parts.to(device), sinks, of.dtype)})
