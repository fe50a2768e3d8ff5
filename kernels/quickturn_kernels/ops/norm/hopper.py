"""Norms in CUDA C++ for Hopper: as the portable ones, but the product behind them may start while they
run.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.norm import reference
from quickturn_kernels.platform import HOPPER, describe
from quickturn_kernels.registry import Priority, register

MAX_WIDTH = 16384


if cuda_build.available((9, 0)):

    @register(
        "rms_norm", name="hopper", platform=HOPPER, dtypes=(torch.bfloat16,), priority=Priority.SPECIALIZED
    )
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `quickturn_kernels.rms_norm`."""
        return _launch(x, None, weight, eps) if _takes(x, weight) else reference.rms_norm(x, weight, eps)

    @register(
        "add_rms_norm",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        priority=Priority.SPECIALIZED,
    )
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `quickturn_kernels.add_rms_norm`."""
        if _takes(x, weight) and _takes(residual, weight):
            return _launch(x, residual, weight, eps)
        return reference.add_rms_norm(x, residual, weight, eps)


def _takes(x: Tensor, weight: Tensor) -> bool:
    return (
        x.shape[1] % 8 == 0
        and x.shape[1] <= MAX_WIDTH
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and weight.dtype in (x.dtype, torch.float32)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


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
        weight.dtype == torch.float32,
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
    function = cuda_build.library(describe(device).capability).quickturn_rms_norm
    pointer, whole, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    function.argtypes = [
        pointer,
        long,
        pointer,
        long,
        pointer,
        whole,
        pointer,
        whole,
        whole,
        ctypes.c_float,
        whole,
        pointer,
    ]
    function.restype = whole
    return function
