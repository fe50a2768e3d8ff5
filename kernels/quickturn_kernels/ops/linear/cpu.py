"""Linear layers through the compiled CPU kernels.

Layouts: `plain` (any dtype, any processor: few rows stream through our own kernel, many go to torch), and
with AMX `amx_bf16`, `amx_int8` and `amx_int4` (kernels/csrc/cpu/tile_linear.h and quant_linear.h), for any
number of rows.
"""

import torch
import torch.nn.functional as functional
from torch import Tensor

from quickturn_kernels.cpu_native import AVAILABLE, CODES, HAS_TILES, address, register_native, rows_of
from quickturn_kernels.ops.linear import PLAIN, LinearWeight, Quantization

if AVAILABLE:
    from quickturn_kernels import _cpu

TILES = "amx_bf16"
QUANTIZED = {"amx_int8": 0, "amx_int4": 1}
"""Layouts of quantised weights, with the extension's numbers for them."""

PANEL = 32
"""Columns of a panel of the tile layouts, and input features of a step."""

_STEP_BYTES = (PANEL * PANEL + 2 * PANEL, PANEL * PANEL // 2 + 4 * PANEL)

STREAM_ROWS = 8
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


def quantize_linear(weight: Tensor, format: Quantization) -> LinearWeight:
    """See `quickturn_kernels.prepare_linear`."""
    columns, features = weight.shape
    if features % PANEL != 0:
        raise LookupError(f"groups of {PANEL} don't divide {features} input features")
    weight = rows_of(weight)
    layout = f"amx_{format}"
    code = QUANTIZED[layout]
    packed = torch.empty((-(-columns // PANEL), features // PANEL, _STEP_BYTES[code]), dtype=torch.uint8)
    _cpu.pack_quant(
        code, CODES[weight.dtype], weight.data_ptr(), packed.data_ptr(), columns, features, weight.stride(0)
    )
    return LinearWeight((columns, features), torch.bfloat16, layout, (packed,))


if HAS_TILES:
    register_native("quantize_linear", traits={"format": {"int8", "int4"}})(quantize_linear)


LAYOUTS = frozenset({PLAIN, TILES, *QUANTIZED})


@register_native("linear", traits={"layout": LAYOUTS})
def linear(x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """See `quickturn_kernels.linear`."""
    if weight.layout != PLAIN:
        return _linear_tiles(x, weight, bias, out_dtype)
    plain = weight.tensors[0]
    rows, columns = x.shape[0], weight.shape[0]
    if rows > STREAM_ROWS or x.dtype != plain.dtype or plain.stride(1) != 1:
        result = functional.linear(x, plain, bias)
        return result if out_dtype is None else result.to(out_dtype)
    x = rows_of(x)
    dtype = x.dtype if out_dtype is None else out_dtype
    out = torch.empty((rows, columns), dtype=dtype)
    _cpu.stream_linear(
        CODES[x.dtype],
        CODES[dtype],
        x.data_ptr(),
        plain.data_ptr(),
        address(bias),
        out.data_ptr(),
        rows,
        columns,
        x.shape[1],
        x.stride(0),
        plain.stride(0),
    )
    return out


def _linear_tiles(
    x: Tensor, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"layout {weight.layout} takes bfloat16, x is {x.dtype}")
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    columns, features = weight.shape
    dtype = torch.bfloat16 if out_dtype is None else out_dtype
    out = torch.empty((rows, columns), dtype=dtype)
    arguments = (
        CODES[dtype],
        x.data_ptr(),
        weight.tensors[0].data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        columns,
        features,
        x.stride(0),
    )
    if weight.layout == TILES:
        _cpu.tile_linear(*arguments)
    else:
        _cpu.quant_linear(QUANTIZED[weight.layout], *arguments)
    return out
