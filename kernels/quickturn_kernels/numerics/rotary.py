"""Cases of rotary_cache_write: head norms, partial rotary, padding slots, strided caches and fused inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.ops.rotary import rotary_cache_write


@dataclass(frozen=True)
class Shape:
    """One call; `slots` are drawn at random, those listed in `padding` are -1."""

    name: str
    tokens: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    norm: bool = False
    wide_norm: bool = False
    padding: Sequence[int] = ()
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    k_scale: float = 0.5


SHAPES = (
    Shape("plain", 7, dtype=torch.float32),
    Shape("padding", 6, padding=(0, 4), dtype=torch.float16),
    Shape("all padding", 2, padding=(0, 1)),
    Shape("no tokens", 0),
    Shape("head norms", 5, heads=8, kv_heads=2, head_dim=128, rotary_dim=128, norm=True),
    Shape("head norms in float32", 5, norm=True, padding=(2,), dtype=torch.float32),
    Shape("head norms with float32 weights", 5, head_dim=128, rotary_dim=32, norm=True, wide_norm=True),
    Shape("partial", 5, head_dim=256, rotary_dim=64, norm=True, dtype=torch.float32),
    Shape("odd sizes", 5, heads=6, kv_heads=2, head_dim=80, rotary_dim=24),
    Shape("one head a group", 3, heads=3, kv_heads=3, dtype=torch.float16),
    Shape("to e4m3", 7, padding=(2,), dtype=torch.float32, fp8=True, k_scale=0.004),
    Shape("to e4m3, norms, partial", 5, head_dim=128, rotary_dim=64, norm=True, fp8=True),
)


def rotary_cases() -> tuple[Case, ...]:
    """One case a shape."""
    return tuple(rotary_case(shape) for shape in SHAPES)


def rotary_case(shape: Shape) -> Case:
    """The case of one shape."""
    traits = {"head_dim": shape.head_dim, "cache": FP8 if shape.fp8 else SAME}
    return Case("rotary_cache_write", shape.name, shape.dtype, traits, partial(_run, shape))


def _run(shape: Shape, generator: Generator, device: torch.device) -> Result:
    block_tokens, longest = 16, 50
    blocks = max(5, 1 + shape.tokens // block_tokens)
    heads = shape.heads + 2 * shape.kv_heads
    fused = torch.randn(shape.tokens, heads, shape.head_dim, generator=generator).to(shape.dtype).to(device)
    q = fused[:, : shape.heads]
    k = fused[:, shape.heads : shape.heads + shape.kv_heads]
    v = fused[:, shape.heads + shape.kv_heads :]
    arena = torch.full((blocks, 3, 2, block_tokens, shape.kv_heads, shape.head_dim), float("nan"))
    arena = arena.to(torch.float8_e4m3fn if shape.fp8 else shape.dtype).to(device)
    slots = torch.randperm(blocks * block_tokens, generator=generator)[: shape.tokens]
    slots[list(shape.padding)] = -1
    positions = torch.randint(0, longest, (shape.tokens,), generator=generator)
    angles = torch.rand(longest, shape.rotary_dim // 2, generator=generator) * 6.28
    norms = (1 + 0.1 * torch.randn(2, shape.head_dim, generator=generator)).to(device)
    norms = norms if shape.wide_norm else norms.to(shape.dtype)
    q_weight, k_weight = norms if shape.norm else (None, None)
    rotary_cache_write(
        q,
        k,
        v,
        positions.to(device),
        torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        arena[:, 1, 0],
        arena[:, 1, 1],
        slots.to(device),
        q_weight=q_weight,
        k_weight=k_weight,
        eps=1e-6,
        k_scale=shape.k_scale,
        v_scale=0.3,
    )
    written = (slots >= 0).to(device)
    # Rotation subtracts products of values around four, which the norm has rounded before.
    if shape.fp8:
        # A key next to a tie may fall to the other side: a step is an eighth of the value, or a little.
        return Result(
            {"q": q[written], "cache": arena.float()},
            {"cache": lambda want, got: torch.allclose(want, got, rtol=0.13, atol=0.07, equal_nan=True)},
            slack=4.0,
        )
    return Result({"q": q[written], "k": k, "v": v, "cache": arena}, slack=4.0 if shape.norm else 1.0)
