"""Blocks lie further apart than 2^31 elements: a block holds every layer, and arenas are large."""

import pytest
import torch

from quickturn_kernels import (
    paged_attention_decode,
    paged_attention_prefill,
    platform,
    registry,
    rotary_cache_write,
    use,
)
from quickturn_kernels.registry import Signature

BLOCK_STRIDE = 1 << 30
BLOCK_TOKENS, KV_HEADS, HEADS, HEAD_DIM = 64, 2, 4, 64
DEVICE = torch.device(platform.current().device)
DTYPE = torch.bfloat16


def implementations(op: str) -> list[str]:
    signature = Signature(DEVICE, DTYPE, {"head_dim": HEAD_DIM})
    machine = platform.describe(DEVICE)
    return [
        one.name
        for one in registry.implementations(op)
        if one.fits(signature) and one.platform.runs_on(machine)
    ]


@pytest.fixture(scope="module")
def far() -> tuple[torch.Tensor, torch.Tensor]:
    """k and v caches of three blocks over 6 GiB of address space, of which little is ever touched."""
    arena = torch.empty(2 * BLOCK_STRIDE + (1 << 20), dtype=DTYPE, device=DEVICE)
    size, stride = (3, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), (BLOCK_STRIDE, KV_HEADS * HEAD_DIM, HEAD_DIM, 1)
    return arena.as_strided(size, stride), arena.as_strided(size, stride, 1 << 19)


def fill(far: tuple[torch.Tensor, torch.Tensor], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks, there and in two near caches."""
    generator = torch.Generator().manual_seed(seed)
    near = torch.randn(2, 3, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, generator=generator).to(DTYPE).to(DEVICE)
    far[0].copy_(near[0])
    far[1].copy_(near[1])
    return near[0], near[1]


@pytest.mark.parametrize("name", implementations("paged_attention_decode"))
def test_decode(name: str, far: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    near = fill(far, seed)
    q = torch.randn(1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([100], dtype=torch.int32, device=DEVICE)

    def run(caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with use(paged_attention_decode=name):
            return paged_attention_decode(q, *caches, table, lens, 0.1, max_context_len=100)

    torch.testing.assert_close(run(far), run(near), rtol=0, atol=0)


@pytest.mark.parametrize("name", implementations("paged_attention_prefill"))
def test_prefill(name: str, far: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    near = fill(far, seed)
    q = torch.randn(90, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([128], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 90], dtype=torch.int32, device=DEVICE)

    def run(caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with use(paged_attention_prefill=name):
            return paged_attention_prefill(q, *caches, table, starts, lens, 90, 0.1, max_context_len=128)

    torch.testing.assert_close(run(far), run(near), rtol=0, atol=0)


@pytest.mark.parametrize("name", implementations("rotary_cache_write"))
def test_cache_write(name: str, far: tuple[torch.Tensor, torch.Tensor], seed: int) -> None:
    near = fill(far, seed)
    fused = torch.randn(3, HEADS + 2 * KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))
    slots = torch.tensor([2 * BLOCK_TOKENS + 5, 3, -1], device=DEVICE)

    def run(caches: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, k, v = (part.to(DTYPE).to(DEVICE) for part in fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
        angles = torch.ones(4, HEAD_DIM, device=DEVICE)
        with use(rotary_cache_write=name):
            rotary_cache_write(q, k, v, torch.arange(3, device=DEVICE), angles, *caches, slots)

    run(far)
    run(near)
    for there, here in zip(far, near, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)
