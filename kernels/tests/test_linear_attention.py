"""The reference of linear attention against transformers' functions, and what every tier must keep to."""

import pytest
import torch
from torch import Generator, Tensor

from quickturn_kernels import (
    causal_conv1d,
    gated_delta_decode,
    gated_delta_prefill,
    gated_rms_norm,
    rms_norm,
    use,
)

modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")

TOKENS, KEY_HEADS, HEADS, DIM = 150, 2, 4, 32


def inputs(seed: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    generator = Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": random(tokens, KEY_HEADS, DIM),
        "k": random(tokens, KEY_HEADS, DIM),
        "v": random(tokens, HEADS, DIM),
        "a": random(tokens, HEADS),
        "b": random(tokens, HEADS),
        "a_log": random(HEADS),
        "dt_bias": random(HEADS),
        "states": random(2, HEADS, DIM, DIM),
    }


def one_row(block_in: int, block_out: int) -> dict[str, Tensor]:
    return {
        "state_in": torch.tensor([block_in], dtype=torch.int32),
        "state_out": torch.tensor([block_out], dtype=torch.int32),
        "state_zero": torch.tensor([block_in < 0]),
    }


def theirs(given: dict[str, Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    g = -given["a_log"].exp() * torch.nn.functional.softplus(given["a"] + given["dt_bias"])
    out, last = modeling.torch_recurrent_gated_delta_rule(
        *(given[name][None] for name in ("q", "k", "v")),
        g=g[None],
        beta=given["b"].sigmoid()[None],
        initial_state=None if state is None else state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], last[0]


@pytest.mark.parametrize("name", ["reference", "torch"])
@pytest.mark.parametrize("block_in", [-1, 0])
def test_prefill_is_transformers_recurrence(name: str, block_in: int, seed: int) -> None:
    given = inputs(seed)
    expected, last = theirs(given, None if block_in < 0 else given["states"][block_in])
    start = torch.tensor([0, TOKENS], dtype=torch.int32)
    with use(gated_delta_prefill=name):
        out = gated_delta_prefill(
            **given, **one_row(block_in, 1), query_start=start, max_query_len=TOKENS, scale=DIM**-0.5
        )
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(given["states"][1], last, rtol=2e-5, atol=2e-5)


def test_decode_is_one_token_of_it(seed: int) -> None:
    given = inputs(seed, tokens=1)
    expected, last = theirs(given, given["states"][0])
    out = gated_delta_decode(**given, **one_row(0, 0), scale=DIM**-0.5)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(given["states"][0], last, rtol=2e-5, atol=2e-5)


def test_convolution_is_transformers(seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x, weight = torch.randn(TOKENS, 24, generator=generator), torch.randn(24, 4, generator=generator)
    states = torch.full((2, 24, 3), torch.nan)
    expected = modeling.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    for first, last in ((0, 1), (1, 3), (3, 100), (100, TOKENS)):
        start = torch.tensor([0, last - first], dtype=torch.int32)
        block = one_row(0 if first else -1, 0)
        out = causal_conv1d(
            x[first:last], weight, states, **block, query_start=start, max_query_len=last - first
        )
        torch.testing.assert_close(out, expected[first:last], rtol=2e-5, atol=2e-5)
    assert torch.equal(states[0], x[-3:].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_norm_is_transformers(dtype: torch.dtype, seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x, gate, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((5, 3, 24), (5, 3, 24), (24,))
    )
    module = modeling.Qwen3NextRMSNormGated(24, eps=1e-5).to(dtype)
    module.weight.data.copy_(weight)
    with use(gated_rms_norm="reference"):
        out = gated_rms_norm(x, gate, weight, 1e-5)
    assert torch.equal(out, module(x, gate).detach())


def test_norm_with_a_wide_weight_is_transformers(seed: int) -> None:
    generator = Generator().manual_seed(seed)
    x = torch.randn(5, 24, generator=generator).bfloat16()
    module = modeling.Qwen3NextRMSNorm(24, eps=1e-5)
    module.weight.data.copy_(torch.randn(24, generator=generator))
    with use(rms_norm="reference"):
        assert torch.equal(rms_norm(x, 1 + module.weight.detach(), 1e-5), module(x).detach())
