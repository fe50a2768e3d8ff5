"""Captured once, replayed for other lengths and parameters: nothing may depend on what the host saw at
capture.
"""

from collections.abc import Callable

import pytest
import torch

from quickturn_kernels import SamplingTensors, paged_attention_decode, paged_attention_prefill, sample, use

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ROWS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS = 5, 8, 2, 128, 64, 80
LENGTHS = ((1, 0, 64, 700, 65), (2000, 1, 1, 1, 1), (0, 0, 0, 0, 0), (333, 444, 555, 0, 2048))


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph of a call, and its output's memory."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@pytest.fixture
def caches(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    size = (ROWS * BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(size, generator=generator, device="cuda").bfloat16() for _ in range(2))
    tables = torch.randperm(ROWS * BLOCKS, generator=generator, device="cuda").int().reshape(ROWS, BLOCKS)
    return k, v, tables


def test_decode_replays_for_other_lengths(caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    q = torch.randn(ROWS, HEADS, HEAD_DIM, device="cuda").bfloat16()
    lens = torch.ones(ROWS, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        return paged_attention_decode(q, *caches, lens, 0.1, max_context_len=BLOCKS * BLOCK_TOKENS)

    graph, out = captured(call)
    for lengths in LENGTHS * 2:
        lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        with use(paged_attention_decode="reference"):
            expected = call()
        torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)


def test_drafts_replay_for_other_lengths(caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    width = 4
    q = torch.randn(ROWS * width, HEADS, HEAD_DIM, device="cuda").bfloat16()
    lens = torch.full((ROWS,), width, dtype=torch.int32, device="cuda")
    starts = torch.arange(0, ROWS * width + 1, width, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        return paged_attention_prefill(
            q, *caches, starts, lens, width, 0.1, max_context_len=BLOCKS * BLOCK_TOKENS
        )

    graph, out = captured(call)
    for lengths in LENGTHS:
        lens.copy_(torch.tensor([length and max(length, width) for length in lengths]))
        out.fill_(float("nan"))
        graph.replay()
        with use(paged_attention_prefill="reference"):
            expected = call()
        torch.testing.assert_close(out, expected, rtol=1.6e-2, atol=1.6e-2)


def test_sampling_replays_for_other_parameters(seed: int) -> None:
    rows, vocabulary = 6, 50000
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(rows, vocabulary, generator=generator, device="cuda") * 3
    floats = torch.tensor([0.0, 1.0, 0.0], device="cuda").repeat(rows, 1)
    whole = torch.zeros(rows, 3, dtype=torch.int64, device="cuda")
    top_k = torch.zeros(rows, dtype=torch.int32, device="cuda")
    params = SamplingTensors(floats[:, 0], top_k, floats[:, 1], floats[:, 2], whole[:, 0], whole[:, 1])
    graph, out = captured(lambda: sample(logits, params).tokens)
    for step in range(4):
        floats[:, 0] = torch.rand(rows, generator=generator, device="cuda") * (step > 0)
        floats[:, 1] = 0.5 + torch.rand(rows, generator=generator, device="cuda") / 2
        top_k.random_(0, 80, generator=generator)
        whole.random_(generator=generator)
        graph.replay()
        with use(sample="reference"):
            expected = sample(logits, params).tokens
        # One token in six may lie within rounding of a border.
        assert int((out == expected).sum()) >= rows - 1
