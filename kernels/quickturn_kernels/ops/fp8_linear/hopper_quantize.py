"""Activations to e4m3 on Hopper (csrc/cuda/quantize.cu)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.fp8_linear import triton
from quickturn_kernels.ops.linear.fp8 import BLOCK, FP8
from quickturn_kernels.platform import describe

MAX_WHOLE_ROW = 16384
"""Columns of the longest row that gets one scale."""


def quantize(x: Tensor, rows: int, whole: bool) -> tuple[Tensor, Tensor]:
    """x [T, K] of 16-bit floats as e4m3 [rows, K] in the column order of the Hopper layouts, and its scales.

    rows: T or more, the rest are zeros. whole: one scale a row, [rows, 1]; else one for 128 columns,
    [rows, ceil(K / 128)], those of one group side by side. K: a multiple of 16. Raises RuntimeError if the
    launch fails.
    """
    count, columns = x.shape
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    if whole and columns > MAX_WHOLE_ROW:
        return triton.quantize_whole_rows(x, rows=rows, permuted=True)
    device = x.device
    out = torch.empty((rows, columns), dtype=torch.uint8, device=device).view(FP8)
    groups = 1 if whole else -(-columns // BLOCK)
    scales = torch.empty((groups, rows), dtype=torch.float32, device=device)
    code = _function(device)(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        scales.data_ptr(),
        count,
        rows,
        columns,
        x.dtype == torch.float16,
        whole,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"quantising {tuple(x.shape)} to e4m3: CUDA error {code}")
    return out, scales.view(rows, 1) if whole else scales.t()


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_quantize
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, ctypes.c_longlong, pointer, pointer, *[whole] * 5, pointer]
    function.restype = whole
    return function
