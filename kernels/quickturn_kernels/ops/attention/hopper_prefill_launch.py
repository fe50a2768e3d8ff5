"""The launch of the Hopper prefill attention (csrc/cuda/attention_prefill.cu)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.attention.triton_common import LOG2_E
from quickturn_kernels.platform import describe
from quickturn_kernels.triton_common import zeroed_counters

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = frozenset({64, 128, 256})
UNITS = 132
"""Multiprocessors of a Hopper."""
TILE_ROWS = 128
TILE_KEYS = {64: 128, 128: 128, 256: 64}
"""By head dim."""
GROUPS = 2
"""Warpgroups, each with its half of a tile."""
MAX_ROWS = 383
BOX = 64
"""Keys that are requested at once, at most."""
MIN_BOX = 8
LEAST_PIECE = 4
"""Units (tiles of keys): what a shorter piece saves, the meeting of the parts costs."""
SECTION_BYTES = 32 << 20
"""Keys and values that blocks work through at the same time: what stays in L2."""
MAX_ROUNDS = 4
LEAST_ROUND = 60
"""Units of a block in a round: the ends of rounds cost, too."""

_POINTERS = ("out", "tables", "starts", "lens", "sinks", "parts", "arrived")
_NUMBERS = (
    "tokens",
    "rows",
    "kv_heads",
    "group",
    "tile_tokens",
    "block_tokens",
    "box",
    "window",
    "rounds",
    "least_piece",
)


class _Arguments(ctypes.Structure):
    """PrefillArguments of attention_prefill.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("table_pitch", ctypes.c_longlong),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int) for name in _NUMBERS),
    ]


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, scale: float) -> bool:
    """Whether `launch` can do this call: pages that the copy engine can address, and not too many rows."""
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    return (
        block_tables.shape[0] <= MAX_ROWS
        and q.shape[1] // kv_heads <= TILE_ROWS
        and block_tokens >= MIN_BOX
        and block_tokens & (block_tokens - 1) == 0
        and scale > 0.0
        and q.stride(2) == 1
        and all(
            tensor.dtype == q.dtype
            and tensor.data_ptr() % 16 == 0
            and all(stride % 8 == 0 for stride in tensor.stride()[:-1])
            for tensor in (q, k_cache, v_cache)
        )
    )


def rounds_for(tokens: int, rows: int, kv_heads: int, head_dim: int, group: int, max_context_len: int) -> int:
    """How often the blocks share a part of the work among them, so that all read the same few heads.

    Judged by bounds: at most `max_context_len` keys a row, of which a token sees half or, where the tokens
    are few, all.
    """
    rows = max(rows, 1)
    stored = rows * max_context_len * kv_heads * head_dim * 4
    seen = max_context_len - min(tokens // rows, max_context_len) // 2
    units = tokens * group // TILE_ROWS * kv_heads * (seen // TILE_KEYS[head_dim])
    return max(1, min(MAX_ROUNDS, stored // SECTION_BYTES, units // (LEAST_ROUND * UNITS)))


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor | None,
    max_context_len: int,
    *,
    rounds: int | None = None,
    least_piece: int = LEAST_PIECE,
) -> Tensor:
    """Attention of rows that `takes` took; returns [T, Hq, D].

    rounds: see `rounds_for`; least_piece: see LEAST_PIECE. Raises RuntimeError if the launch fails.
    """
    tokens, heads, head_dim = q.shape
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    device = q.device
    out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=device)
    if tokens == 0:
        return out
    rows = context_lens.shape[0]
    query_start, context_lens = query_start.contiguous(), context_lens.contiguous()
    if sinks is not None:
        sinks = sinks.float().contiguous()
    blocks = describe(device).units
    if rounds is None:
        rounds = rounds_for(tokens, rows, kv_heads, head_dim, group, max_context_len)
    pieces = blocks * rounds
    parts = torch.empty((pieces * 2, GROUPS, head_dim // 8 + 1, 128, 4), dtype=torch.float32, device=device)
    arguments = _Arguments(
        out=out.data_ptr(),
        tables=block_tables.data_ptr(),
        starts=query_start.data_ptr(),
        lens=context_lens.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        parts=parts.data_ptr(),
        arrived=zeroed_counters(device, pieces * GROUPS).data_ptr(),
        table_pitch=block_tables.stride(0),
        scale_log2=scale * LOG2_E,
        tokens=tokens,
        rows=rows,
        kv_heads=kv_heads,
        group=group,
        tile_tokens=TILE_ROWS // group,
        block_tokens=block_tokens,
        box=min(block_tokens, BOX),
        window=window,
        rounds=rounds,
        least_piece=least_piece,
    )
    pitches = (
        q.stride(0),
        q.stride(1),
        k_cache.stride(1),
        k_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(0),
        k_cache.shape[0],
    )
    code = _function(device)(
        ctypes.byref(arguments),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        (ctypes.c_longlong * len(pitches))(*pitches),
        head_dim,
        q.dtype == torch.float16,
        blocks,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"prefill attention of {tuple(q.shape)} over pages {tuple(k_cache.shape)}: CUDA error {code}"
        )
    return out


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_attention_prefill
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        ctypes.POINTER(_Arguments),
        pointer,
        pointer,
        pointer,
        ctypes.POINTER(ctypes.c_longlong),
        whole,
        whole,
        whole,
        pointer,
    ]
    function.restype = whole
    return function
