"""The causal convolution in Triton: a program has some tokens of one row and some channels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.ops.linear_attention.triton_common import row_of, silu
from quickturn_kernels.triton_common import next_power_of_two, rows_pad

MAX_TOKENS = 32
ELEMENTS = 4096
"""Of a program's tile; 128 threads hold 32 each."""


@triton.jit
def convolve_kernel(
    x,
    weight,
    bias,
    states,
    state_in,
    state_out,
    state_zero,
    query_start,
    kept_start,
    kept_tokens,
    kept_rows,
    out,
    rows,
    channels,
    x_stride,
    weight_stride,
    block_stride,
    state_stride,
    tap_stride,
    HAS_BIAS: tl.constexpr,
    KEEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ROWS_PAD: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Tokens `tile * BLOCK_T ...` of a row. The row's first tile sees to its states: no other reads or
    writes one, so a block may be read and written by one step.
    """
    if DIRECT:
        row, tile = tl.program_id(0), 0
    else:
        row, tile = row_of(query_start, tl.program_id(0), rows, BLOCK_T, 1, ROWS_PAD)
    start = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - start
    if tile * BLOCK_T >= length:
        return
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    position = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    target = tl.load(state_out + row).to(tl.int64)
    source = tl.load(state_in + row).to(tl.int64)
    # Bounds instead of flags: the interpreter can't mask by a scalar. A padding row has no inputs.
    limit = tl.where(target >= 0, length, 0)
    reading = (source >= 0) & (tl.load(state_zero + row) == 0) & (target >= 0)
    oldest = tl.where(reading, 1 - WIDTH, 0)
    tokens = x + start.to(tl.int64) * x_stride + channel
    before = states + source * block_stride + channel * state_stride
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        at = position - (WIDTH - 1) + tap
        mask = inside[None, :] & ((at >= 0) & (at < limit))[:, None]
        value = tl.load(tokens[None, :] + at.to(tl.int64)[:, None] * x_stride, mask=mask, other=0.0)
        old = inside[None, :] & ((at < 0) & (at >= oldest))[:, None]
        at_old = (at + WIDTH - 1)[:, None] * tap_stride
        value += tl.load(before[None, :] + at_old, mask=old, other=0.0).to(value.dtype)
        factor = tl.load(weight + channel * weight_stride + tap, mask=inside, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor[None, :]
    written = inside[None, :] & (position < length)[:, None]
    result = tl.where(target >= 0, silu(total), 0.0).to(out.dtype.element_ty)
    place = out + (start.to(tl.int64) + position)[:, None] * channels + channel[None, :]
    tl.store(place, result, mask=written)
    if tile == 0 and target >= 0:
        # Another thread may have read what this one is about to write.
        tl.debug_barrier()
        if KEEPS:
            for index in range(tl.load(kept_start + row), tl.load(kept_start + row + 1)):
                after = tl.load(kept_tokens + index)
                block = tl.load(kept_rows + index).to(tl.int64)
                kept = states + block * block_stride + channel * state_stride
                _store(kept, tokens, before, after, oldest, channel, channels, x_stride, tap_stride, WIDTH)
        kept = states + target * block_stride + channel * state_stride
        _store(kept, tokens, before, length, oldest, channel, channels, x_stride, tap_stride, WIDTH)


@triton.jit
def _store(kept, tokens, before, after, oldest, channel, channels, x_stride, tap_stride, WIDTH: tl.constexpr):
    """The state after `after` >= 1 tokens. Its taps go from the oldest, and come from later ones in `before`,
    so that the two may be the same.
    """
    for tap in tl.static_range(WIDTH - 1):
        at = after - (WIDTH - 1) + tap
        value = tl.load(
            tokens + at.to(tl.int64) * x_stride, mask=channel < tl.where(at >= 0, channels, 0), other=0.0
        )
        old = channel < tl.where((at < 0) & (at >= oldest), channels, 0)
        value += tl.load(before + (after + tap) * tap_stride, mask=old, other=0.0).to(value.dtype)
        tl.store(kept + tap * tap_stride, value.to(kept.dtype.element_ty), mask=channel < channels)


def launch(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    query_start: Tensor,
    max_query_len: int,
    bias: Tensor | None,
    boundaries: Boundaries | None,
) -> Tensor:
    """See `quickturn_kernels.causal_conv1d`."""
    tokens, channels = x.shape
    rows = state_in.shape[0]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    if tokens == 0 or rows == 0:
        return out
    block_t = min(MAX_TOKENS, next_power_of_two(max_query_len))
    block_c = min(ELEMENTS // block_t, 512, next_power_of_two(channels))
    direct = max_query_len <= block_t
    slots = rows if direct else tokens // block_t + rows
    kept = (query_start,) * 3
    if boundaries is not None:
        kept = (boundaries.row_start, boundaries.tokens, boundaries.rows)
    convolve_kernel[(slots, triton.cdiv(channels, block_c))](
        x,
        weight,
        weight if bias is None else bias,
        states,
        state_in,
        state_out,
        state_zero.view(torch.uint8),
        query_start,
        *kept,
        out,
        rows,
        channels,
        x.stride(0),
        weight.stride(0),
        states.stride(0),
        states.stride(1),
        states.stride(2),
        HAS_BIAS=bias is not None,
        KEEPS=boundaries is not None,
        WIDTH=weight.shape[1],
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        ROWS_PAD=rows_pad(rows),
        DIRECT=direct,
        num_warps=4,
    )
    return out
