"""The pages of some rows, out of a cache in e4m3 into one of 16-bit floats."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.triton_common import next_power_of_two

TOKENS = 8
"""Of a program."""


@triton.jit(do_not_specialize=["width", "table_stride"])
def widen_kernel(
    k_cache,
    v_cache,
    tables,
    lens,
    keys,
    values,
    width,
    table_stride,
    k_block_stride,
    k_row_stride,
    v_block_stride,
    v_row_stride,
    BLOCK_TOKENS: tl.constexpr,
    LINE: tl.constexpr,
    LINE_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """TOKENS tokens of one page; a token is a LINE of all kv heads."""
    page = tl.program_id(0)
    row = page // width
    index = page % width
    first = tl.program_id(1) * TOKENS
    if index * BLOCK_TOKENS + first < tl.load(lens + row):
        block = tl.load(tables + row * table_stride + index).to(tl.int64)
        token = first + tl.arange(0, TOKENS)[:, None]
        column = tl.arange(0, LINE_PAD)[None, :]
        inside = (token < BLOCK_TOKENS) & (column < LINE)
        to = (page.to(tl.int64) * BLOCK_TOKENS + token) * LINE + column
        key = tl.load(k_cache + block * k_block_stride + token * k_row_stride + column, mask=inside)
        tl.store(keys + to, key.to(keys.dtype.element_ty), mask=inside)
        value = tl.load(v_cache + block * v_block_stride + token * v_row_stride + column, mask=inside)
        tl.store(values + to, value.to(values.dtype.element_ty), mask=inside)


def widen(
    k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [R * width, block_tokens, Hkv, D] of `dtype`, and tables [R, width] of them.

    k_cache, v_cache, tables: as for `paged_attention_prefill`; lens: [R] int32, keys of each row; width:
    pages of the longest row. What lies past a row's keys is unspecified.
    """
    rows = lens.shape[0]
    _, block_tokens, kv_heads, head_dim = k_cache.shape
    shape = (rows * width, block_tokens, kv_heads, head_dim)
    keys, values = (torch.empty(shape, dtype=dtype, device=k_cache.device) for _ in range(2))
    own = torch.arange(rows * width, dtype=torch.int32, device=k_cache.device).view(rows, width)
    widen_kernel[(rows * width, triton.cdiv(block_tokens, TOKENS))](
        k_cache,
        v_cache,
        tables,
        lens,
        keys,
        values,
        width,
        tables.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        BLOCK_TOKENS=block_tokens,
        LINE=kv_heads * head_dim,
        LINE_PAD=next_power_of_two(kv_heads * head_dim),
        TOKENS=TOKENS,
        num_warps=4,
    )
    return keys, values, own
