"""Forms of the Hopper kernels that the choice by size wouldn't reach with small cases."""

import pytest
import torch
from torch import Generator

from quickturn_kernels import causal_conv1d, gated_delta_prefill, gated_delta_step, use

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from quickturn_kernels.ops.linear_attention import hopper_prefill, hopper_step

BF16, DIM, KEY_HEADS = torch.bfloat16, 128, 2


@pytest.mark.parametrize("columns", [hopper_step.STREAMED, 64, 128])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_step(columns: int, group: int, state_dtype: torch.dtype, seed: int) -> None:
    if columns != hopper_step.STREAMED and DIM // columns * group > hopper_step.MAX_CLUSTER:
        pytest.skip("too many blocks for a cluster")
    generator = Generator("cuda").manual_seed(seed)
    rows, heads = 150, KEY_HEADS * group

    def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    channels = (2 * KEY_HEADS + heads) * DIM
    blocks = torch.randperm(2 * rows, generator=generator, device="cuda").int()
    # The first half of the rows stay where they are.
    state_in, state_out = blocks[:rows].clone(), torch.cat((blocks[: rows // 2], blocks[rows + rows // 2 :]))
    state_zero = torch.rand(rows, generator=generator, device="cuda") < 0.1
    state_out[::7] = -1
    states = random(2 * rows, 3, heads, DIM, DIM, dtype=state_dtype)
    conv_states = random(2 * rows, 3, channels, 3)
    unread = torch.ones(2 * rows, dtype=torch.bool, device="cuda")
    unread[state_in[~state_zero & (state_out >= 0)].long()] = False
    states[unread], conv_states[unread] = torch.nan, torch.nan
    arguments = (random(rows, channels), random(channels, 4))
    gates = (random(rows, heads), random(rows, heads), random(heads, dtype=torch.float32) - 2)
    gates = (*gates, random(heads, dtype=torch.float32))
    norm = (random(rows, heads, DIM), random(DIM), 1e-6)
    found = []
    for ours in (False, True):
        s, c = states.clone(), conv_states.clone()
        places = (s[:, 1], state_in, state_out, state_zero)
        if ours:
            out = hopper_step.launch(
                *arguments, c[:, 1], *gates, *places, KEY_HEADS, DIM**-0.5, None, *norm, True, columns
            )
        else:
            with use(**{"*": "reference"}):
                out = gated_delta_step(
                    *arguments,
                    c[:, 1],
                    *gates,
                    *places,
                    key_heads=KEY_HEADS,
                    scale=DIM**-0.5,
                    gate=norm[0],
                    norm_weight=norm[1],
                )
        found.append((out, c, s.to(BF16)))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
def test_prefill(groups: int, state_dtype: torch.dtype, seed: int) -> None:
    generator = Generator("cuda").manual_seed(seed)
    lengths, heads = (70, 1, 500, 64, 0, 129), 3 * KEY_HEADS
    tokens, rows = sum(lengths), len(lengths)

    def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    given = [random(tokens, KEY_HEADS, DIM), random(tokens, KEY_HEADS, DIM), random(tokens, heads, DIM)]
    given += [random(tokens, heads), random(tokens, heads)]
    given += [random(heads, dtype=torch.float32) - 2, random(heads, dtype=torch.float32)]
    states = random(2 * rows, heads, DIM, DIM, dtype=state_dtype)
    block = torch.arange(rows, device="cuda", dtype=torch.int32)
    places = (block, block + rows, torch.zeros(rows, dtype=torch.bool, device="cuda"))
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    lens = starts[1:] - starts[:-1] + 40
    ours = states.clone()
    out = hopper_prefill.launch(*given, ours, *places, starts, lens, max(lengths), DIM**-0.5, None, groups)
    with use(gated_delta_prefill="torch"):
        expected = gated_delta_prefill(
            *given,
            states,
            *places,
            query_start=starts,
            max_query_len=max(lengths),
            scale=DIM**-0.5,
            context_lens=lens,
        )
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(ours.float(), states.float(), rtol=2e-2, atol=2e-2)


def test_convolution_of_many_channels(seed: int) -> None:
    generator = Generator("cuda").manual_seed(seed)
    lengths, channels = (1, 1, 0, 300, 33, 32), 4096 + 8
    rows = len(lengths)
    # A part of a wider projection.
    x = torch.randn(sum(lengths), channels + 64, generator=generator, device="cuda").to(BF16)[:, :channels]
    weight = torch.randn(channels, 4, generator=generator, device="cuda").to(BF16)
    states = torch.randn(rows, 2, channels, 3, generator=generator, device="cuda").to(BF16)
    block = torch.arange(rows, device="cuda", dtype=torch.int32)
    starts = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    found = []
    for name in ("reference", "hopper"):
        kept = states.clone()
        with use(causal_conv1d=name):
            out = causal_conv1d(
                x,
                weight,
                kept[:, 1],
                block,
                block,
                block == 1,
                query_start=starts,
                max_query_len=max(lengths),
            )
        found.append((out, kept))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)
