"""Cases of rotary_attention_decode: the shapes of decode attention, with head norms and without."""

from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.attention import BF16, FP16, FP32, SCALES, Shape, paged_cache
from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.ops.attention_step import rotary_attention_decode

SHAPES = (
    Shape("ragged", (1, 64, 65, 0, 200)),
    Shape("one long row", (1100,), block_tokens=64),
    Shape("newest key opens a block", (65, 129, 1), heads=8, head_dim=128, block_tokens=64),
    Shape("long beside short", (3, 700, 16, 17), heads=8, head_dim=128, block_tokens=32),
    Shape("dim 256", (70, 33, 0), heads=8, kv_heads=1, head_dim=256, block_tokens=64),
    Shape("window", (5, 300, 129, 64), head_dim=128, window=100, block_tokens=64),
    Shape("window of one", (5, 64, 65, 81, 129), window=1),
    Shape("odd group", (40, 130), heads=10, kv_heads=2),
    Shape("many rows", tuple(range(0, 400, 9)), heads=8, head_dim=128, block_tokens=64),
    Shape("dim 24 in float32", (33, 7), head_dim=24, dtype=FP32),
    Shape("float16", (33, 0, 129), heads=8, head_dim=128, block_tokens=64, dtype=FP16),
    Shape("e4m3", (1, 64, 65, 0, 200, 129), heads=8, fp8=True),
    Shape("e4m3, dim 128", (65, 129, 1, 0, 700), heads=8, head_dim=128, block_tokens=64, fp8=True),
    Shape("e4m3, dim 256, float16", (70, 33, 0), heads=8, head_dim=256, dtype=FP16, fp8=True),
    Shape("e4m3, window", (5, 300, 129, 64), head_dim=128, window=100, block_tokens=64, fp8=True),
)


def attention_step_cases() -> tuple[Case, ...]:
    """Each shape plain, with head norms, and gated; in bfloat16 also as a kernel that starts early."""
    ways = ((False, False), (True, False), (True, True))
    return tuple(attention_step_case(shape, norms, gated) for shape in SHAPES for norms, gated in ways)


def attention_step_case(shape: Shape, norms: bool, gated: bool = False) -> Case:
    """The case of one shape. gated: with a gate, float32 norm weights, and a quarter of the dims turned."""
    return Case(
        "rotary_attention_decode",
        f"{shape.name}{', norms' if norms else ''}{', gated' if gated else ''}",
        shape.dtype,
        {"head_dim": shape.head_dim, "cache": FP8 if shape.fp8 else SAME},
        partial(_run, shape, norms, gated),
        {"rotary_cache_write": "", "paged_attention_decode": "", "sigmoid_gate": ""},
    )


def _run(shape: Shape, norms: bool, gated: bool, generator: Generator, device: torch.device) -> Result:
    k_cache, v_cache, tables = paged_cache(shape, generator, device)
    rows, size = len(shape.contexts), shape.block_tokens
    parts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads if gated else 0)
    fused = torch.randn(rows, sum(parts), shape.head_dim, generator=generator)
    q, k, v, gate = fused.to(shape.dtype).to(device).split_with_sizes(parts, 1)
    lens = torch.tensor(shape.contexts, dtype=torch.int32, device=device)
    positions = (lens.long() - 1).clamp(min=0)
    blocks = tables[torch.arange(rows, device=device), positions // size].long()
    slots = torch.where(lens > 0, blocks * size + positions % size, -1)
    longest = max(shape.contexts)
    turned = shape.head_dim // 4 if gated and shape.head_dim >= 64 else shape.head_dim
    angles = torch.rand(longest, turned // 2, generator=generator) * 6.28
    weights = (1 + 0.1 * torch.randn(2, shape.head_dim, generator=generator)).to(device)
    weights = weights if gated else weights.to(shape.dtype)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    out = rotary_attention_decode(
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        tables,
        lens,
        shape.head_dim**-0.5,
        q_weight=weights[0] if norms else None,
        k_weight=weights[1] if norms else None,
        window=shape.window,
        max_context_len=longest + 70,
        settled=shape.dtype == BF16,
        k_scale=SCALES[0] if shape.fp8 else 1.0,
        v_scale=SCALES[1] if shape.fp8 else 1.0,
        # A view of what has all heads side by side.
        gate=torch.as_strided(gate, (rows, gate[0].numel()), (gate.stride(0), 1)) if gated else None,
    )
    if shape.fp8:
        # A key next to a tie may fall to the other side, and is then read so.
        caches = {"k_cache": k_cache.float(), "v_cache": v_cache.float()}

        def close(want: Tensor, got: Tensor) -> bool:
            return torch.allclose(want, got, rtol=0.13, atol=0.05, equal_nan=True)

        return Result({"out": out, **caches}, dict.fromkeys(caches, close), slack=4.0)
    return Result({"out": out, "k_cache": k_cache, "v_cache": v_cache}, slack=4.0 if norms else 1.0)
