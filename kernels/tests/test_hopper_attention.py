"""Decode attention on Hopper beyond the numerics suite: graphs replayed for other lengths, repeated bits."""

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels import cuda_build, platform, registry

HOPPER = platform.current().capability == (9, 0) and cuda_build.available((9, 0))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and its compiler")

ROWS, HEADS, KV_HEADS, DIM, BLOCK_TOKENS, LONGEST = 6, 8, 2, 128, 64, 3000


def attend(qkv: Tensor, cache: Tensor, tables: Tensor, lens: Tensor, cos_sin: Tensor) -> Tensor:
    q, k, v = qkv.clone().split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
    positions = (lens.long() - 1).clamp(min=0)
    blocks = tables.gather(1, positions[:, None] // BLOCK_TOKENS)[:, 0].long()
    slots = torch.where(lens > 0, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, -1)
    return kernels.rotary_attention_decode(
        q,
        k,
        v,
        positions,
        cos_sin,
        cache[:, 0],
        cache[:, 1],
        slots,
        tables,
        lens,
        DIM**-0.5,
        max_context_len=LONGEST,
    )


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)]
)
def test_a_graph_serves_any_lengths_with_the_same_bits(seed: int, dtype: torch.dtype, fp8: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    options = {"device": "cuda", "generator": generator}
    width = -(-LONGEST // BLOCK_TOKENS)
    shape = (ROWS * width, 2, BLOCK_TOKENS, KV_HEADS, DIM)
    cache = torch.randn(shape, dtype=dtype, **options).to(torch.float8_e4m3fn if fp8 else dtype)
    tables = torch.randperm(ROWS * width, **options).to(torch.int32).view(ROWS, width)
    qkv = torch.randn((ROWS, HEADS + 2 * KV_HEADS, DIM), dtype=dtype, **options)
    cos_sin = torch.rand((LONGEST, DIM), **options)
    lens = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
    attend(qkv, cache, tables, lens, cos_sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(qkv, cache, tables, lens, cos_sin)
    for _ in range(20):
        lens.copy_(torch.randint(0, LONGEST, (ROWS,), **options))
        lens[int(torch.randint(0, ROWS, (), **options))] = 0
        graph.replay()
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
        with registry.use(
            rotary_attention_decode="reference", paged_attention_decode="triton_fp8" if fp8 else "triton"
        ):
            expected = attend(qkv, cache, tables, lens, cos_sin)
        torch.testing.assert_close(first, expected, rtol=1.6e-2, atol=1.6e-2)
