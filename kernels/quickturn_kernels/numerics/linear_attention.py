"""Cases of linear attention: ragged rows whose states lie in a poisoned arena."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.linear_attention import (
    causal_conv1d,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_step,
    gated_rms_norm,
)
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

PADDING = -1


@dataclass(frozen=True)
class Rows:
    """A batch: tokens of each row, tokens before them, which rows begin with zeros, which are padding, and
    the (row, tokens) after which states are kept, in rising order.
    """

    name: str
    lengths: tuple[int, ...]
    before: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    kept: tuple[tuple[int, int], ...] = ()
    in_place: bool = True


@dataclass(frozen=True)
class Heads:
    """Sizes of the heads, the dtypes of activations and of recurrent states, and whether each key channel has
    a decay of its own.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype = FP32
    state_dtype: torch.dtype = FP32
    channelwise: bool = False

    def __str__(self) -> str:
        kinds = "/".join(str(one).removeprefix("torch.") for one in (self.dtype, self.state_dtype))
        sizes = f"{self.key_heads}/{self.heads} heads {self.key_dim}x{self.value_dim}"
        return f"{sizes} {kinds}{', channelwise' if self.channelwise else ''}"


PROMPTS = (
    Rows("one row", (90,)),
    Rows("ragged", (1, 64, 0, 65, 130, 3), fresh=(0, 4), padding=(2,)),
    Rows("going on off the grid", (70, 64, 9), before=(50, 64, 127), fresh=(2,), in_place=False),
    Rows(
        "states kept",
        (110, 2, 65),
        before=(30, 1, 64),
        fresh=(0,),
        kept=((0, 34), (0, 98), (0, 100), (1, 1), (2, 64)),
        in_place=False,
    ),
    Rows("padding only", (5, 70), padding=(0, 1)),
)
RAGGED = PROMPTS[1:2]
STEPS = (
    Rows("one row", (1,)),
    Rows("fresh and padding", (1,) * 5, fresh=(1,), padding=(3,), in_place=False),
    Rows("in place", (1,) * 3, fresh=(2,)),
)
HEADS = (
    Heads(1, 2, 16, 16),
    Heads(2, 2, 24, 40),
    Heads(1, 2, 24, 16, channelwise=True),
    Heads(1, 2, 128, 128, BF16),
)
MORE_HEADS = (
    Heads(1, 3, 128, 128, BF16, BF16),
    Heads(1, 1, 256, 64, FP16),
    Heads(2, 2, 128, 128, BF16, channelwise=True),
)
"""Prompts of these are only the ragged ones: interpreted, they take long."""

WIDTHS = ((40, 4, FP32), (256, 4, BF16), (64, 2, FP16))


def linear_attention_cases() -> tuple[Case, ...]:
    """Cases of these ops."""
    found = []
    for rows in (*PROMPTS, *STEPS):
        for channels, width, dtype in WIDTHS:
            found.append(convolution_case(rows, channels, width, dtype))
    for heads in (*HEADS, *MORE_HEADS):
        for rows in PROMPTS if heads in HEADS else RAGGED:
            found.append(prompt_case(rows, heads))
        for rows in STEPS:
            found += step_cases(rows, heads)
    for size, dtype in (((0, 32), FP32), ((3, 2, 100), FP32), ((5, 4, 128), BF16), ((7, 128), FP16)):
        for weight_dtype, activation in ((dtype, "silu"), (FP32, "sigmoid")):
            found.append(gated_norm_case(size, dtype, weight_dtype, activation))
    return tuple(found)


def convolution_case(rows: Rows, channels: int, width: int, dtype: torch.dtype) -> Case:
    """causal_conv1d of `channels` with `width` taps."""
    name = f"{rows.name}, {len(rows.lengths)} rows, {channels} x {width} {str(dtype)[6:]}"
    return Case(
        "causal_conv1d", name, dtype, {"width": width}, partial(_convolve, rows, channels, width, dtype)
    )


def prompt_case(rows: Rows, heads: Heads) -> Case:
    """gated_delta_prefill."""
    name, run = f"{rows.name}, {heads}", partial(_prefill, rows, heads)
    return Case("gated_delta_prefill", name, heads.dtype, _traits(heads), run)


def step_cases(rows: Rows, heads: Heads) -> tuple[Case, ...]:
    """gated_delta_decode, and gated_delta_step with its norm and without."""
    name, traits = f"{rows.name}, {heads}", _traits(heads)
    companions = dict.fromkeys(("causal_conv1d", "gated_delta_decode", "gated_rms_norm"), "")
    return (
        Case("gated_delta_decode", name, heads.dtype, traits, partial(_decode, rows, heads)),
        *(
            Case(
                "gated_delta_step",
                f"{name}{', norm' if normed else ''}",
                heads.dtype,
                traits,
                partial(_step, rows, heads, normed),
                companions,
            )
            for normed in (False, True)
        ),
    )


def gated_norm_case(
    size: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype, activation: str
) -> Case:
    """gated_rms_norm."""
    kinds = f"{str(dtype)[6:]}, {str(weight_dtype)[6:]} weight"
    run = partial(_norm, size, dtype, weight_dtype, activation)
    return Case("gated_rms_norm", f"{' x '.join(map(str, size))} {kinds}, {activation}", dtype, {}, run)


def _traits(heads: Heads) -> dict[str, Hashable]:
    square = heads.key_dim if heads.key_dim == heads.value_dim else 0
    return {"head_dim": square, "channelwise": heads.channelwise}


@dataclass(frozen=True)
class Arena:
    """States of a batch: an arena of two layers (NaN wherever nothing may be read), the second layer's part
    of it, and the blocks of rows and of kept states.
    """

    whole: Tensor
    states: Tensor
    rows: Mapping[str, Tensor]
    kept: Tensor


def arena(
    rows: Rows, shape: tuple[int, ...], dtype: torch.dtype, generator: Generator, device: torch.device
) -> Arena:
    """Blocks in random order; a row reads one, writes the same or another, and each kept state has its
    own.
    """
    count = len(rows.lengths)
    order = torch.randperm(2 * count + len(rows.kept) + 2, generator=generator).to(torch.int32)
    whole = torch.full((len(order), 2, *shape), torch.nan)
    state_in = order[:count].clone()
    state_out = state_in.clone() if rows.in_place else order[count : 2 * count].clone()
    zero = torch.zeros(count, dtype=torch.bool)
    for row in range(count):
        if row in rows.padding:
            state_out[row] = PADDING
        elif row in rows.fresh:
            # Both ways of saying so.
            zero[row] = row % 2 == 0
            state_in[row] = state_in[row] if zero[row] else -1
        elif rows.lengths[row]:
            whole[state_in[row], 1] = torch.randn(shape, generator=generator)
    whole = whole.to(dtype).to(device)
    indexes = {"state_in": state_in, "state_out": state_out, "state_zero": zero}
    return Arena(
        whole,
        whole[:, 1],
        {name: value.to(device) for name, value in indexes.items()},
        order[2 * count : 2 * count + len(rows.kept)].to(device),
    )


def boundaries(rows: Rows, given: Arena) -> Boundaries | None:
    """What is kept on the way, if anything."""
    if not rows.kept:
        return None
    owners = [row for row, _ in rows.kept]
    first = [sum(owner < row for owner in owners) for row in range(len(rows.lengths) + 1)]
    tokens = [tokens for _, tokens in rows.kept]
    whole = partial(torch.tensor, dtype=torch.int32, device=given.kept.device)
    return Boundaries(whole(first), whole(tokens), given.kept)


def starts(rows: Rows, device: torch.device) -> Tensor:
    """The cumulative lengths."""
    return torch.tensor([0, *rows.lengths]).cumsum(0).to(torch.int32).to(device)


def apart(generator: Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Random rows that lie apart in memory, NaN between them, as parts of a fused projection do."""
    size = torch.Size(shape[1:]).numel()
    wide = torch.full((shape[0], 8 + size), torch.nan)
    wide[:, 8:] = torch.randn(shape[0], size, generator=generator)
    return wide.to(dtype).to(device)[:, 8:].view(shape)


def _convolve(
    rows: Rows, channels: int, width: int, dtype: torch.dtype, generator: Generator, device: torch.device
) -> Result:
    given = arena(rows, (channels, width - 1), dtype, generator, device)
    bias = torch.randn(channels, generator=generator).to(dtype).to(device) if width == 4 else None
    out = causal_conv1d(
        apart(generator, dtype, device, sum(rows.lengths), channels),
        torch.randn(channels, width, generator=generator).to(dtype).to(device),
        given.states,
        **given.rows,
        query_start=starts(rows, device),
        max_query_len=max(rows.lengths),
        bias=bias,
        boundaries=boundaries(rows, given),
    )
    return Result({"out": out, "arena": given.whole})


def _gates(heads: Heads, tokens: int, generator: Generator, device: torch.device) -> dict[str, Tensor]:
    size = (heads.heads, heads.key_dim) if heads.channelwise else (heads.heads,)
    width = torch.Size(size).numel()
    fused = apart(generator, heads.dtype, device, tokens, width + heads.heads)
    a, b = fused.split_with_sizes((width, heads.heads), dim=1)
    # From a memory of a token or two to one of hundreds.
    a_log = (torch.rand(heads.heads, generator=generator) * 6 - 5).to(device)
    dt_bias = torch.randn(size, generator=generator).to(device)
    return {"a": a.view(tokens, *size), "b": b, "a_log": a_log, "dt_bias": dt_bias}


def _projected(heads: Heads, tokens: int, generator: Generator, device: torch.device) -> dict[str, Tensor]:
    sizes = (heads.key_heads * heads.key_dim,) * 2 + (heads.heads * heads.value_dim,)
    q, k, v = apart(generator, heads.dtype, device, tokens, sum(sizes)).split_with_sizes(sizes, dim=1)
    found = {"q": q.view(tokens, heads.key_heads, heads.key_dim)}
    found["k"] = k.view(tokens, heads.key_heads, heads.key_dim)
    found["v"] = v.view(tokens, heads.heads, heads.value_dim)
    return {**found, **_gates(heads, tokens, generator, device)}


def _prefill(rows: Rows, heads: Heads, generator: Generator, device: torch.device) -> Result:
    shape = (heads.heads, heads.key_dim, heads.value_dim)
    given = arena(rows, shape, heads.state_dtype, generator, device)
    lens = None
    if rows.before:
        pairs = zip(rows.before, rows.lengths, strict=True)
        lens = torch.tensor([sum(pair) for pair in pairs], dtype=torch.int32, device=device)
    out = gated_delta_prefill(
        **_projected(heads, sum(rows.lengths), generator, device),
        states=given.states,
        **given.rows,
        query_start=starts(rows, device),
        max_query_len=max(rows.lengths),
        scale=heads.key_dim**-0.5,
        context_lens=lens,
        boundaries=boundaries(rows, given),
    )
    # Half-precision operands leave their own rounding in float32 states.
    slack = 1.0 if heads.dtype == FP32 else 2.0
    return Result({"out": out, "arena": given.whole.to(heads.dtype)}, slack=slack)


def _decode(rows: Rows, heads: Heads, generator: Generator, device: torch.device) -> Result:
    shape = (heads.heads, heads.key_dim, heads.value_dim)
    given = arena(rows, shape, heads.state_dtype, generator, device)
    out = gated_delta_decode(
        **_projected(heads, len(rows.lengths), generator, device),
        states=given.states,
        **given.rows,
        scale=heads.key_dim**-0.5,
    )
    return Result({"out": out, "arena": given.whole})


def _step(rows: Rows, heads: Heads, normed: bool, generator: Generator, device: torch.device) -> Result:
    count, width = len(rows.lengths), 4
    channels = 2 * heads.key_heads * heads.key_dim + heads.heads * heads.value_dim
    shape = (heads.heads, heads.key_dim, heads.value_dim)
    given = arena(rows, shape, heads.state_dtype, generator, device)
    inputs = torch.randn(given.whole.shape[0], 1, channels, width - 1, generator=generator)
    conv = torch.where(given.whole[:, 1:, 0, 0, :1, None].isnan().cpu(), torch.nan, inputs)
    conv = conv.to(heads.dtype).to(device)
    gate = apart(generator, heads.dtype, device, count, heads.heads, heads.value_dim) if normed else None
    out = gated_delta_step(
        apart(generator, heads.dtype, device, count, channels),
        torch.randn(channels, width, generator=generator).to(heads.dtype).to(device),
        conv[:, 0],
        **_gates(heads, count, generator, device),
        states=given.states,
        **given.rows,
        key_heads=heads.key_heads,
        scale=heads.key_dim**-0.5,
        gate=gate,
        norm_weight=torch.randn(heads.value_dim, generator=generator).to(device) if normed else None,
        eps=1e-6,
        settled=device.type == "cuda",
    )
    # The convolution's result may be rounded to the other side.
    arena_out = given.whole.to(heads.dtype)
    return Result({"out": out, "arena": arena_out, "conv": conv}, slack=4.0 if normed else 1.0)


def _norm(
    size: tuple[int, ...],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    activation: str,
    generator: Generator,
    device: torch.device,
) -> Result:
    x = torch.randn(size, generator=generator).to(dtype).to(device)
    gate = apart(generator, dtype, device, *size)
    weight = torch.randn(size[-1], generator=generator).to(weight_dtype).to(device)
    # The normed value, its product with the weight, and that with the gate.
    return Result({"out": gated_rms_norm(x, gate, weight, 1e-5, activation=activation)}, roundings=3)
