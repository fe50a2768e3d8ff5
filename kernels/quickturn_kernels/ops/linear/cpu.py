"""Linear layers through the compiled CPU kernels.

Layouts: `plain` (any dtype, any processor: few rows stream through our own kernel, many go to torch) and
`amx_bf16` (bfloat16 in AMX tiles, every number of rows; kernels/csrc/cpu/tile_linear.h describes it).
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, address, register_native, rows_of
from quickturn_kernels.ops.linear import PLAIN, LinearWeight

if AVAILABLE:
    from quickturn_kernels import _cpu

TILES = "amx_bf16"
PANEL = 32
"""Columns of a panel of the tile layout, and input features of a step."""

STREAM_ROWS = 4
"""The most rows for which streaming a plain weight is faster than torch's product."""


@register_native("prepare_linear")
def prepare_linear(weight: Tensor, max_rows_hint: int | None) -> LinearWeight:
    """Pack into tiles where the processor has them, else keep. See `quickturn_kernels.prepare_linear`."""
    columns, features = weight.shape
    if weight.dtype != torch.bfloat16 or features % PANEL != 0 or not _cpu.has_tiles():
        return LinearWeight((columns, features), weight.dtype, PLAIN, (weight.contiguous(),))
    weight = rows_of(weight)
    packed = torch.empty((-(-columns // PANEL), features // PANEL, 2, 16, PANEL), dtype=weight.dtype)
    _cpu.pack_tiles(weight.data_ptr(), packed.data_ptr(), columns, features, weight.stride(0))
    return LinearWeight((columns, features), weight.dtype, TILES, (packed,))


@register_native("linear", traits={"layout": {PLAIN, TILES}})
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`."""
    rows = x.shape[0]
    columns, features = weight.shape
    dtype = x.dtype if out_dtype is None else out_dtype
    packed = weight.tensors[0]
    if weight.layout == TILES:
        x = rows_of(x)
        out = torch.empty((rows, columns), dtype=dtype)
        _cpu.tile_linear(
            CODES[dtype],
            x.data_ptr(),
            packed.data_ptr(),
            address(bias),
            out.data_ptr(),
            rows,
            columns,
            features,
            x.stride(0),
        )
        return out
    if rows > STREAM_ROWS or x.dtype != packed.dtype or packed.stride(1) != 1:
        result = functional.linear(x, packed, bias)
        return result if out_dtype is None else result.to(out_dtype)
    x = rows_of(x)
    out = torch.empty((rows, columns), dtype=dtype)
    _cpu.stream_linear(
        CODES[x.dtype],
        CODES[dtype],
        x.data_ptr(),
        packed.data_ptr(),
        address(bias),
        out.data_ptr(),
        rows,
        columns,
        features,
        x.stride(0),
        packed.stride(0),
    )
    return out
