"""The launch of the Hopper decode attention (csrc/cuda/attention_decode.cu)."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.attention.triton_common import LOG2_E
from quickturn_kernels.platform import describe
from quickturn_kernels.triton_common import zeroed_counters

HEAD_DIMS = frozenset({64, 128, 256})
DTYPES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
MAX_ROWS = 1024
MAX_GROUP = 16

_POINTERS = (
    "q",
    "k",
    "v",
    "q_weight",
    "k_weight",
    "gate",
    "cos_sin",
    "k_cache",
    "v_cache",
    "out",
    "tables",
    "lens",
    "parts",
    "part_stats",
    "arrived",
)
_PITCHES = (
    "q_token",
    "q_head",
    "k_token",
    "k_head",
    "v_token",
    "v_head",
    "cos_sin_row",
    "table",
    "gate",
    "k_block",
    "k_row",
    "v_block",
    "v_row",
)


class _Arguments(ctypes.Structure):
    """DecodeArguments of attention_decode.cuh."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_pitch", ctypes.c_longlong) for name in _PITCHES),
        *((name, ctypes.c_float) for name in ("scale_log2", "eps", "k_scale", "v_scale")),
        *(
            (name, ctypes.c_int)
            for name in ("rows", "kv_heads", "group", "block_tokens", "window", "table_width", "stages")
        ),
        *((name, ctypes.c_int) for name in ("rotated", "wide")),
    ]


def takes(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `launch` can do this call: pages of q's dtype or of e4m3 that the copy engine can address."""
    rows, heads, _ = q.shape
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    itemsize = k_cache.element_size()
    return (
        0 < rows <= MAX_ROWS
        and heads // kv_heads <= MAX_GROUP
        and block_tokens >= 16 // itemsize
        and block_tokens & (block_tokens - 1) == 0
        and q.stride(2) == 1
        and k_cache.dtype in (q.dtype, FP8)
        and all(
            cache.dtype == k_cache.dtype
            and cache.data_ptr() % 16 == 0
            and all(stride * itemsize % 16 == 0 for stride in cache.stride()[:3])
            for cache in (k_cache, v_cache)
        )
    )


def turns(rotated: int, head_dim: int) -> bool:
    """Whether the kernel can turn so many of a head's dims: all, or few enough of the first ones."""
    lanes, rest = divmod(rotated, head_dim // 32)
    return rotated == head_dim or (0 < rotated <= head_dim // 2 and rest == 0 and lanes & (lanes - 1) == 0)


def tile_keys(head_dim: int, fp8: bool) -> int:
    """Keys of a tile, the unit that the work is cut into (kTileKeys in attention_decode.cuh)."""
    return 128 if fp8 and head_dim != 256 else 64


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    max_context_len: int,
    *,
    fresh: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    gate: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Attention of rows that `takes` took; returns [R, Hq, D].

    fresh: (k, v, cos_sin, q_weight, k_weight) of rows whose newest key isn't in the cache and whose q isn't
    rotated. scales: what k and v are divided by on their way to an e4m3 cache. gate: [R, Hq D]. early: may
    start before the kernel ahead has finished, see `rotary_attention_decode`. Raises RuntimeError if the
    launch fails.
    """
    rows, heads, head_dim = q.shape
    block_tokens, kv_heads = k_cache.shape[1], k_cache.shape[2]
    group = heads // kv_heads
    device = q.device
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=device)
    context_lens = context_lens.contiguous()
    fp8 = k_cache.dtype == FP8
    tiles = -(-max_context_len // tile_keys(head_dim, fp8))
    blocks = min(describe(device).units, rows * kv_heads * tiles)
    parts = torch.empty(blocks * 2 * group * (head_dim + 2), dtype=torch.float32, device=device)
    arguments = _Arguments(
        q=q.data_ptr(),
        k_cache=k_cache.data_ptr(),
        v_cache=v_cache.data_ptr(),
        out=out.data_ptr(),
        tables=block_tables.data_ptr(),
        lens=context_lens.data_ptr(),
        parts=parts.data_ptr(),
        part_stats=parts.data_ptr() + blocks * 2 * group * head_dim * 4,
        arrived=zeroed_counters(device, rows * kv_heads).data_ptr(),
        q_token_pitch=q.stride(0),
        q_head_pitch=q.stride(1),
        table_pitch=block_tables.stride(0),
        k_block_pitch=k_cache.stride(0),
        k_row_pitch=k_cache.stride(1),
        v_block_pitch=v_cache.stride(0),
        v_row_pitch=v_cache.stride(1),
        scale_log2=scale * LOG2_E,
        eps=eps,
        k_scale=scales[0],
        v_scale=scales[1],
        rows=rows,
        kv_heads=kv_heads,
        group=group,
        block_tokens=block_tokens,
        window=window,
        table_width=block_tables.shape[1],
    )
    if fresh is not None:
        k, v, cos_sin, q_weight, k_weight = fresh
        arguments.k, arguments.k_token_pitch, arguments.k_head_pitch = k.data_ptr(), k.stride(0), k.stride(1)
        arguments.v, arguments.v_token_pitch, arguments.v_head_pitch = v.data_ptr(), v.stride(0), v.stride(1)
        arguments.cos_sin, arguments.cos_sin_row_pitch = cos_sin.data_ptr(), cos_sin.stride(0)
        arguments.q_weight = None if q_weight is None else q_weight.data_ptr()
        arguments.k_weight = None if k_weight is None else k_weight.data_ptr()
        arguments.rotated = cos_sin.shape[1]
        arguments.wide = q_weight is not None and q_weight.dtype == torch.float32
    if gate is not None:
        arguments.gate, arguments.gate_pitch = gate.data_ptr(), gate.stride(0)
    code = _function(device, fp8)(
        ctypes.byref(arguments),
        q.dtype == torch.float16,
        head_dim,
        k_cache.shape[0],
        blocks,
        early,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(
            f"decode attention of {tuple(q.shape)} over pages {tuple(k_cache.shape)}: CUDA error {code}"
        )
    return out


@cache
def _function(device: torch.device, fp8: bool) -> "ctypes._FuncPointer":
    kernels = library(describe(device).capability)
    function = kernels.quickturn_attention_decode_fp8 if fp8 else kernels.quickturn_attention_decode
    whole = ctypes.c_int
    function.argtypes = [
        ctypes.POINTER(_Arguments),
        whole,
        whole,
        ctypes.c_longlong,
        whole,
        whole,
        ctypes.c_void_p,
    ]
    function.restype = whole
    return function
