"""Routing and the sorting into tiles on a Hopper GPU: the launches of csrc/cuda/moe_route.cu."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.moe.triton_tiles import Tiles, empty_tiles
from quickturn_kernels.ops.moe.weights import Routing
from quickturn_kernels.platform import describe

MAX_EXPERTS, MAX_TOP = 512, 16
SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_after": 2}
SORT_BLOCK = 1024


class Rules(ctypes.Structure):
    """RoutingRules of csrc/cuda/moe_route.cuh."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("experts", "top", "scoring", "normalize")),
        ("scale", ctypes.c_float),
        ("correction", ctypes.c_void_p),
    ]


class _TileArguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("chosen", "counts")),
        *((name, ctypes.c_void_p) for name in ("tile_experts", "tile_rows", "tile_pairs", "tiles")),
        *((name, ctypes.c_int) for name in ("pairs", "experts", "size")),
    ]


def takes(experts: int, routing: Routing, correction: Tensor | None) -> bool:
    """Whether the kernels can choose by these rules: no groups, a float32 correction."""
    return (
        routing.groups == 1
        and experts <= MAX_EXPERTS
        and routing.top_k <= MAX_TOP
        and (correction is None or (correction.dtype == torch.float32 and correction.is_contiguous()))
    )


def rules(experts: int, routing: Routing, correction: Tensor | None) -> Rules:
    """The rules as the kernels read them; `correction` must outlive the launch."""
    address = None if correction is None else correction.data_ptr()
    scoring = SCORINGS[routing.scoring]
    return Rules(experts, routing.top_k, scoring, routing.normalize, routing.scale, address)


def launch_route(
    logits: Tensor, routing: Routing, correction: Tensor | None, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `quickturn_kernels.route`. logits: float32, rows contiguous. Raises RuntimeError if it fails."""
    tokens, experts = logits.shape
    device = logits.device
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=device)
    chosen = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=device)
    if tokens == 0:
        return weights, chosen
    code = _route(device)(
        ctypes.byref(rules(experts, routing, correction)),
        logits.data_ptr(),
        logits.stride(0),
        None if positions is None else positions.data_ptr(),
        weights.data_ptr(),
        chosen.data_ptr(),
        tokens,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"route {tuple(logits.shape)}, {routing}: CUDA error {code}")
    return weights, chosen


def make_tiles(chosen: Tensor, experts: int, size: int) -> Tiles:
    """As `triton_tiles.make_tiles`, for at most 512 experts. Raises RuntimeError if the launch fails."""
    device, pairs = chosen.device, chosen.numel()
    tiles = empty_tiles(pairs, experts, size, device)
    counts = torch.empty((-(-pairs // SORT_BLOCK), experts), dtype=torch.int32, device=device)
    arguments = _TileArguments(
        chosen=chosen.data_ptr(),
        counts=counts.data_ptr(),
        tile_experts=tiles.experts.data_ptr(),
        tile_rows=tiles.rows.data_ptr(),
        tile_pairs=tiles.pairs.data_ptr(),
        tiles=tiles.used.data_ptr(),
        pairs=pairs,
        experts=experts,
        size=size,
    )
    code = _tiles(device)(ctypes.byref(arguments), torch.cuda.current_stream(device).cuda_stream)
    if code != 0:
        raise RuntimeError(f"tiles of {pairs} pairs, {experts} experts: CUDA error {code}")
    return tiles


@cache
def _route(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_route
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [
        ctypes.POINTER(Rules),
        pointer,
        ctypes.c_longlong,
        *[pointer] * 3,
        whole,
        pointer,
    ]
    function.restype = whole
    return function


@cache
def _tiles(device: torch.device) -> "ctypes._FuncPointer":
    function = library(describe(device).capability).quickturn_moe_tiles
    function.argtypes = [ctypes.POINTER(_TileArguments), ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function
