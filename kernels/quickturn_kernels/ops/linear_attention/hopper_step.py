"""The launch of the decode step (csrc/cuda/gated_delta_step.cu, gated_delta_stream.cu)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.platform import describe

HEAD_DIM = 128
WIDTH = 4
MAX_CLUSTER = 8
MAX_GRID = 65535
STREAMED = 0
"""As columns: whole states, carried through shared memory by thread blocks that stay."""

STREAMED_GROUPS = (1, 2, 4, 8)

_POINTERS = (
    "qkv",
    "conv_weight",
    "conv_bias",
    "conv_states",
    "a",
    "b",
    "a_log",
    "dt_bias",
    "states",
    "state_in",
    "state_out",
    "state_zero",
    "gate",
    "norm_weight",
    "out",
)
_PITCHES = ("qkv", "conv_block", "a", "b", "state_block", "gate", "gate_head")


class _Arguments(ctypes.Structure):
    """GatedDeltaStepArguments of gated_delta_step.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_pitch", ctypes.c_longlong) for name in _PITCHES),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((name, ctypes.c_int) for name in ("rows", "key_heads", "heads", "wide_norm_weight", "settled")),
    ]


def takes(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_states: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    key_heads: int,
    gate: Tensor | None,
    norm_weight: Tensor | None,
) -> bool:
    """Whether `launch` can do this call."""
    rows, heads = a.shape
    half = qkv.dtype
    return (
        0 < rows <= MAX_GRID
        and heads // key_heads <= MAX_CLUSTER
        and conv_weight.shape[1] == WIDTH
        and conv_weight.is_contiguous()
        and conv_weight.data_ptr() % 8 == 0
        and conv_states.stride(1) == WIDTH - 1
        and conv_states.stride(2) == 1
        and states.shape[2:] == (HEAD_DIM, HEAD_DIM)
        and states.stride()[1:] == (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)
        and states.dtype in (torch.float32, torch.bfloat16)
        and states.stride(0) * states.element_size() % 16 == 0
        and states.data_ptr() % 16 == 0
        and all(x.dtype == half for x in (conv_weight, conv_states, a, b))
        and all(x.stride(1) == 1 for x in (qkv, a, b))
        and a_log.dtype == dt_bias.dtype == torch.float32
        and (gate is None or norm_weight is None or _takes_norm(gate, norm_weight, half))
    )


def _takes_norm(gate: Tensor, norm_weight: Tensor, half: torch.dtype) -> bool:
    return (
        gate.dtype == half
        and gate.stride(2) == 1
        and gate.stride(0) % 4 == gate.stride(1) % 4 == 0
        and gate.data_ptr() % 8 == 0
        and norm_weight.dtype in (half, torch.float32)
        and norm_weight.data_ptr() % 16 == 0
    )


def columns_for(rows: int, key_heads: int, group: int, state_dtype: torch.dtype, units: int) -> int:
    """Columns of a state for one thread block, as measured best: whole states through the ring from a k
    head a multiprocessor, below that blocks of one head or half a head.
    """
    if rows * key_heads >= units and group in STREAMED_GROUPS:
        return STREAMED
    return HEAD_DIM // 2 if state_dtype == torch.bfloat16 and 2 * group <= MAX_CLUSTER else HEAD_DIM


def launch(
    qkv: Tensor,
    conv_weight: Tensor,
    conv_states: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    key_heads: int,
    scale: float,
    conv_bias: Tensor | None,
    gate: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    settled: bool,
    columns: int | None = None,
) -> Tensor:
    """`quickturn_kernels.gated_delta_step` of rows that `takes` took. columns: as `columns_for`. Raises
    RuntimeError if the launch fails.
    """
    rows, heads = a.shape
    device = qkv.device
    out = torch.empty((rows, heads, HEAD_DIM), dtype=qkv.dtype, device=device)
    if columns is None:
        columns = columns_for(rows, key_heads, heads // key_heads, states.dtype, describe(device).units)
    arguments = _Arguments(
        qkv=qkv.data_ptr(),
        conv_weight=conv_weight.data_ptr(),
        conv_bias=None if conv_bias is None else conv_bias.data_ptr(),
        conv_states=conv_states.data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        a_log=a_log.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        states=states.data_ptr(),
        state_in=state_in.data_ptr(),
        state_out=state_out.data_ptr(),
        state_zero=state_zero.data_ptr(),
        out=out.data_ptr(),
        qkv_pitch=qkv.stride(0),
        conv_block_pitch=conv_states.stride(0),
        a_pitch=a.stride(0),
        b_pitch=b.stride(0),
        state_block_pitch=states.stride(0),
        scale=scale,
        eps=eps,
        rows=rows,
        key_heads=key_heads,
        heads=heads,
        settled=settled,
    )
    if gate is not None and norm_weight is not None:
        arguments.gate, arguments.norm_weight = gate.data_ptr(), norm_weight.data_ptr()
        arguments.gate_pitch, arguments.gate_head_pitch = gate.stride(0), gate.stride(1)
        arguments.wide_norm_weight = norm_weight.dtype == torch.float32
    stream, half = torch.cuda.current_stream(device).cuda_stream, states.dtype == torch.bfloat16
    if columns == STREAMED:
        blocks = min(describe(device).units, rows * key_heads)
        code = _functions(device)[1](ctypes.byref(arguments), half, blocks, stream)
    else:
        code = _functions(device)[0](ctypes.byref(arguments), half, columns, stream)
    if code != 0:
        raise RuntimeError(f"gated delta step of {rows} rows, {key_heads}/{heads} heads: CUDA error {code}")
    return out


@cache
def _functions(device: torch.device) -> "tuple[ctypes._FuncPointer, ctypes._FuncPointer]":
    built = library(describe(device).capability)
    functions = built.quickturn_gated_delta_step, built.quickturn_gated_delta_stream
    for function in functions:
        function.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        function.restype = ctypes.c_int
    return functions
