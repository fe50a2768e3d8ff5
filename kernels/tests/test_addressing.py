"""Blocks lie further apart than 2^31 elements: a block holds every layer, and arenas are large."""

import pytest
import torch

from quickturn_kernels import (
    causal_conv1d,
    gated_delta_decode,
    gated_delta_prefill,
    paged_attention_decode,
    paged_attention_prefill,
    platform,
    registry,
    rotary_attention_decode,
    rotary_cache_write,
    use,
)
from quickturn_kernels.registry import Signature

BLOCK_STRIDE = 1 << 30
BLOCK_TOKENS, KV_HEADS, HEADS, HEAD_DIM = 64, 2, 4, 64
DEVICE = torch.device(platform.current().device)
DTYPE = torch.bfloat16


def implementations(op: str, dtype: torch.dtype = DTYPE, **traits: object) -> list[str]:
    signature = Signature(DEVICE, dtype, traits or {"head_dim": HEAD_DIM, "cache": "same"})
    machine = platform.describe(DEVICE)
    return [
        one.name
        for one in registry.implementations(op)
        if one.fits(signature) and one.platform.runs_on(machine)
    ]


def random(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DTYPE).to(DEVICE)


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


@pytest.mark.parametrize("name", implementations("rotary_attention_decode", head_dim=128, cache="same"))
def test_step(name: str, seed: int) -> None:
    """Write and read in one kernel, heads of 128."""
    arena = torch.empty(2 * BLOCK_STRIDE + (1 << 20), dtype=DTYPE, device=DEVICE)
    size, stride = (3, BLOCK_TOKENS, KV_HEADS, 128), (BLOCK_STRIDE, KV_HEADS * 128, 128, 1)
    far = arena.as_strided(size, stride), arena.as_strided(size, stride, 1 << 19)
    near = tuple(random(seed, 2, *size))
    far[0].copy_(near[0])
    far[1].copy_(near[1])
    q, k, v = random(seed, 1, HEADS + 2 * KV_HEADS, 128).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    table = torch.tensor([[0, 2]], dtype=torch.int32, device=DEVICE)
    place = torch.tensor([2 * BLOCK_TOKENS + 35], device=DEVICE)
    angles = random(seed, 128, 128).float()

    def run(caches: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with use(rotary_attention_decode=name):
            return rotary_attention_decode(
                *(part.clone() for part in (q, k, v)),
                torch.tensor([99], device=DEVICE),
                angles,
                *caches,  # type: ignore[arg-type]
                place,
                table,
                torch.tensor([100], dtype=torch.int32, device=DEVICE),
                0.1,
                max_context_len=100,
            )

    torch.testing.assert_close(run(far), run(near), rtol=0, atol=0)
    for there, here in zip(far, near, strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)


@pytest.mark.parametrize("name", implementations("paged_attention_decode", head_dim=HEAD_DIM, cache="fp8"))
def test_decode_of_a_cache_in_e4m3(name: str, seed: int) -> None:
    arena = torch.empty(2 * BLOCK_STRIDE + (1 << 20), dtype=torch.uint8, device=DEVICE)
    size, stride = (3, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), (BLOCK_STRIDE, KV_HEADS * HEAD_DIM, HEAD_DIM, 1)
    near = random(seed, 2, *size).to(torch.float8_e4m3fn)
    far = [arena.as_strided(size, stride, at << 19) for at in range(2)]
    for there, here in zip(far, near, strict=True):
        there.copy_(here.view(torch.uint8))
    q = random(seed, 1, HEADS, HEAD_DIM)
    table = torch.tensor([[2, 0]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([100], dtype=torch.int32, device=DEVICE)

    def run(caches: list[torch.Tensor]) -> torch.Tensor:
        with use(paged_attention_decode=name):
            return paged_attention_decode(q, *caches, table, lens, 0.1, max_context_len=100)

    torch.testing.assert_close(
        run([one.view(torch.float8_e4m3fn) for one in far]), run(list(near)), rtol=0, atol=0
    )


STATE_OPS = [
    (op, name)
    for op in ("causal_conv1d", "gated_delta_decode", "gated_delta_prefill")
    for name in implementations(op, torch.float32, head_dim=64, width=4, channelwise=False)
]


@pytest.mark.parametrize(("op", "name"), STATE_OPS)
def test_states(op: str, name: str, seed: int) -> None:
    """Two rows of one token: one goes on from the last block, one is written there."""
    heads, dim, width = 2, 64, 4
    channels = heads * dim
    size = (3, channels, width - 1) if op == "causal_conv1d" else (3, heads, dim, dim)
    stride = torch.empty(size[1:], device="meta").stride()
    arena = torch.empty(2 * BLOCK_STRIDE + (1 << 20), device=DEVICE)
    near = random(seed, *size).float()
    far = arena.as_strided(size, (BLOCK_STRIDE, *stride))
    far.copy_(near)
    rows = [torch.tensor(ids, dtype=torch.int32, device=DEVICE) for ids in ((2, 1), (0, 2))]
    rows.append(torch.zeros(2, dtype=torch.bool, device=DEVICE))
    starts = torch.arange(3, dtype=torch.int32, device=DEVICE)
    q, k, v = random(seed, 3, 2, heads, dim).float()
    a, b = random(seed, 2, 2, heads).float()

    def run(states: torch.Tensor) -> torch.Tensor:
        with use(**{op: name}):
            if op == "causal_conv1d":
                weight = random(seed, channels, width).float()
                return causal_conv1d(q.flatten(1), weight, states, *rows, starts, max_query_len=1)
            given = (q, k, v, a, b, a[0], b[0], states, *rows)
            if op == "gated_delta_decode":
                return gated_delta_decode(*given, scale=0.1)
            return gated_delta_prefill(*given, starts, max_query_len=1, scale=0.1)

    torch.testing.assert_close(run(far), run(near), rtol=0, atol=0)
    torch.testing.assert_close(far, near, rtol=0, atol=0)
