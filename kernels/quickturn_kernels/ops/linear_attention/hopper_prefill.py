"""The launches of prompts' two kernels (csrc/cuda/gated_delta_prepare.cu, gated_delta_prefill.cu)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.linear_attention import CHUNK
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.ops.linear_attention.triton_prefill import FACTORS, SPARE, Prepared
from quickturn_kernels.platform import describe

HEAD_DIM = 128
MAX_GRID = 65535

_POINTERS = (
    "q",
    "k",
    "v",
    "solved",
    "scores",
    "factors",
    "states",
    "state_in",
    "state_out",
    "state_zero",
    "query_start",
    "context_lens",
    "kept_start",
    "kept_tokens",
    "kept_rows",
    "out",
)
_PITCHES = ("q", "k", "v", "state_block")
_COUNTS = ("tokens", "rows", "key_heads", "heads", "slots", "half_states")


class _PrepareArguments(ctypes.Structure):
    """GatedDeltaPrepareArguments of gated_delta_prefill.cuh."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "k",
                "a",
                "b",
                "a_log",
                "dt_bias",
                "query_start",
                "context_lens",
                "solved",
                "scores",
                "factors",
            )
        ),
        *((f"{name}_pitch", ctypes.c_longlong) for name in ("q", "k", "a", "b")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "key_heads", "heads", "slots")),
    ]


class _Arguments(ctypes.Structure):
    """GatedDeltaScanArguments of gated_delta_prefill.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_pitch", ctypes.c_longlong) for name in _PITCHES),
        *((name, ctypes.c_int) for name in _COUNTS),
    ]


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: int,
) -> bool:
    """Whether `launch` can do this call: heads that the copy engine can address, 128 wide."""
    return (
        a.dtype == b.dtype == torch.bfloat16
        and a.stride(1) == b.stride(1) == 1
        and a_log.dtype == dt_bias.dtype == torch.float32
        and 0 < rows <= MAX_GRID
        and q.shape[0] > 0
        and all(
            x.dtype == torch.bfloat16
            and x.shape[2] == HEAD_DIM
            and x.stride()[1:] == (HEAD_DIM, 1)
            and x.stride(0) % 8 == 0
            and x.data_ptr() % 16 == 0
            for x in (q, k, v)
        )
        and states.stride()[1:] == (HEAD_DIM * HEAD_DIM, HEAD_DIM, 1)
        and states.dtype in (torch.float32, torch.bfloat16)
    )


def prepare(
    q: Tensor,
    k: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    query_start: Tensor,
    context_lens: Tensor | None,
    scale: float,
) -> Prepared:
    """What `triton_prefill.prepare` does. Raises RuntimeError if the launch fails."""
    tokens, heads = a.shape
    rows = query_start.shape[0] - 1
    device = q.device
    slots = tokens // CHUNK + SPARE * rows
    solved, scores = torch.empty((2, slots, heads, CHUNK, CHUNK), dtype=q.dtype, device=device).unbind()
    factors = torch.empty((slots, heads, FACTORS, CHUNK), dtype=torch.float32, device=device)
    arguments = _PrepareArguments(
        q=q.data_ptr(),
        k=k.data_ptr(),
        a=a.data_ptr(),
        b=b.data_ptr(),
        a_log=a_log.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        query_start=query_start.data_ptr(),
        context_lens=None if context_lens is None else context_lens.data_ptr(),
        solved=solved.data_ptr(),
        scores=scores.data_ptr(),
        factors=factors.data_ptr(),
        q_pitch=q.stride(0),
        k_pitch=k.stride(0),
        a_pitch=a.stride(0),
        b_pitch=b.stride(0),
        scale=scale,
        tokens=tokens,
        rows=rows,
        key_heads=k.shape[1],
        heads=heads,
        slots=slots,
    )
    code = _prepare_function(device)(ctypes.byref(arguments), torch.cuda.current_stream(device).cuda_stream)
    if code != 0:
        raise RuntimeError(f"preparation of {tokens} tokens, {k.shape[1]}/{heads} heads: CUDA error {code}")
    return Prepared(solved, scores, factors)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    state_zero: Tensor,
    query_start: Tensor,
    context_lens: Tensor | None,
    max_query_len: int,
    scale: float,
    boundaries: Boundaries | None,
    groups: int | None = None,
    made: Prepared | None = None,
) -> Tensor:
    """`quickturn_kernels.gated_delta_prefill` of what `takes` took.

    groups: warpgroups of a thread block, 1 or 2, each with 64 columns of a head's state. made: what `prepare`
    gave, if that was done. Raises RuntimeError if a launch fails.
    """
    tokens, heads, _ = v.shape
    rows = state_in.shape[0]
    device = q.device
    if made is None:
        made = prepare(q, k, a, b, a_log, dt_bias, query_start, context_lens, scale)
    out = torch.empty(v.shape, dtype=q.dtype, device=device)
    if groups is None:
        # Two share what is loaded, but gain no time otherwise: measured better where rows are one chunk.
        groups = 2 if max_query_len <= CHUNK and rows * heads >= describe(device).units else 1
    arguments = _Arguments(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        solved=made.solved.data_ptr(),
        scores=made.scores.data_ptr(),
        factors=made.factors.data_ptr(),
        states=states.data_ptr(),
        state_in=state_in.data_ptr(),
        state_out=state_out.data_ptr(),
        state_zero=state_zero.data_ptr(),
        query_start=query_start.data_ptr(),
        context_lens=None if context_lens is None else context_lens.data_ptr(),
        out=out.data_ptr(),
        q_pitch=q.stride(0),
        k_pitch=k.stride(0),
        v_pitch=v.stride(0),
        state_block_pitch=states.stride(0),
        tokens=tokens,
        rows=rows,
        key_heads=k.shape[1],
        heads=heads,
        slots=made.slots,
        half_states=states.dtype == torch.bfloat16,
    )
    if boundaries is not None:
        arguments.kept_start = boundaries.row_start.data_ptr()
        arguments.kept_tokens = boundaries.tokens.data_ptr()
        arguments.kept_rows = boundaries.rows.data_ptr()
    code = _function(device)(ctypes.byref(arguments), groups, torch.cuda.current_stream(device).cuda_stream)
    if code != 0:
        raise RuntimeError(f"gated delta prefill of {tuple(v.shape)}: CUDA error {code}")
    return out


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_gated_delta_scan
    function.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_int, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


@cache
def _prepare_function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_gated_delta_prepare
    function.argtypes = [ctypes.POINTER(_PrepareArguments), ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
