"""Norms in CUDA C++ for Hopper: as the portable ones, but the product behind them may start while they
run.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.platform import describe

MAX_WIDTH = 16384


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.rms_norm`."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `quickturn_kernels.add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    code = _function(x.device)(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        eps,
        True,
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"rms norm of {tuple(x.shape)}: CUDA error {code}")
    return out


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_rms_norm
    pointer, whole, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    function.argtypes = [
        pointer,
        long,
        pointer,
        long,
        pointer,
        pointer,
        whole,
        whole,
        ctypes.c_float,
        whole,
        pointer,
    ]
    function.restype = whole
    return function
