"""The launch of the causal convolution (csrc/cuda/causal_conv.cu)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.platform import describe

WIDTH = 4

_POINTERS = (
    "x",
    "weight",
    "bias",
    "states",
    "state_in",
    "state_out",
    "state_zero",
    "query_start",
    "kept_start",
    "kept_tokens",
    "kept_rows",
    "out",
)


class _Arguments(ctypes.Structure):
    """CausalConvArguments of causal_conv.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_pitch", ctypes.c_longlong) for name in ("x", "block")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "channels")),
    ]


def takes(x: Tensor, weight: Tensor, states: Tensor, rows: int) -> bool:
    """Whether `launch` can do this call: vectors of eight channels everywhere."""
    return (
        x.shape[0] > 0
        and rows > 0
        and x.shape[1] % 8 == 0
        and x.stride(0) % 8 == 0
        and x.stride(1) == 1
        and weight.is_contiguous()
        and weight.dtype == states.dtype == x.dtype
        and states.stride()[1:] == (WIDTH - 1, 1)
        and states.stride(0) % 8 == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, states))
    )


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
    """`quickturn_kernels.causal_conv1d` of what `takes` took. Raises RuntimeError if the launch fails."""
    tokens, channels = x.shape
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    arguments = _Arguments(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        states=states.data_ptr(),
        state_in=state_in.data_ptr(),
        state_out=state_out.data_ptr(),
        state_zero=state_zero.data_ptr(),
        query_start=query_start.data_ptr(),
        out=out.data_ptr(),
        x_pitch=x.stride(0),
        block_pitch=states.stride(0),
        tokens=tokens,
        rows=state_in.shape[0],
        channels=channels,
    )
    if boundaries is not None:
        arguments.kept_start = boundaries.row_start.data_ptr()
        arguments.kept_tokens = boundaries.tokens.data_ptr()
        arguments.kept_rows = boundaries.rows.data_ptr()
    code = _function(x.device)(ctypes.byref(arguments), torch.cuda.current_stream(x.device).cuda_stream)
    if code != 0:
        raise RuntimeError(f"convolution of {tuple(x.shape)}: CUDA error {code}")
    return out


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_causal_conv
    function.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
