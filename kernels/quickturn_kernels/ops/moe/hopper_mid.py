"""Mixtures of experts over up to 64 tokens on a Hopper GPU: choice and sort in one launch, Triton's products
with the shared expert among the others, the weighted sum in one launch (csrc/cuda/moe_mid.cu).
"""

import ctypes
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import FEW_ROWS, PLAIN, linear
from quickturn_kernels.ops.moe import route_with, router_logits
from quickturn_kernels.ops.moe.hopper_route import MAX_EXPERTS, MAX_TOP, Rules, rules
from quickturn_kernels.ops.moe.hopper_route import takes as takes_rules
from quickturn_kernels.ops.moe.triton import FEW, Shape, down, gate_up, shape_for
from quickturn_kernels.ops.moe.triton_tiles import Tiles, empty_tiles
from quickturn_kernels.ops.moe.weights import ExpertWeights, Router, Routing, SharedExpert
from quickturn_kernels.platform import describe

WIDE_TOKENS = 16
"""From so many tokens on `WIDE_DOWN` is 1 to 2% ahead for the whole layer (H200, 256 experts, 8 a token)."""

WIDE_DOWN = replace(FEW, down=128, warps=8)


class _Sort(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logits", "positions", "weights", "chosen")),
        *((name, ctypes.c_void_p) for name in ("tile_experts", "tile_pairs", "tiles")),
        ("rules", Rules),
        ("logits_pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("tokens", "slots", "size")),
    ]


class _Combine(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("results", "weights", "chosen", "positions", "shared")),
        *((name, ctypes.c_void_p) for name in ("x", "gate", "out")),
        *((name, ctypes.c_longlong) for name in ("shared_pitch", "x_pitch", "out_pitch")),
        *((name, ctypes.c_int) for name in ("tokens", "top", "slots", "experts", "hidden", "adds")),
    ]


@dataclass(frozen=True)
class Choice:
    """Who chooses whom: either float32 logits [T, E], rows contiguous, and the rules to choose by, or
    `given`, float32 weights and int32 experts [T, k], contiguous. correction: float32 [E].
    """

    routing: Routing
    logits: Tensor | None = None
    correction: Tensor | None = None
    given: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class _Sorted:
    """The choice [T, k], and the pairs in tiles: of each token the choices' and, with `joined`, another one
    of the shared expert.
    """

    weights: Tensor
    chosen: Tensor
    tiles: Tiles
    shape: Shape
    slots: int
    joined: SharedExpert | None


def takes(experts: ExpertWeights, top: int, shared: SharedExpert | None) -> bool:
    """Whether `launch` can do this layer for some tokens: bfloat16 weights or e4m3 ones, at most 512 experts
    and 16 choices, a hidden size in multiples of 8.
    """
    gate = None if shared is None else shared.gate
    return (
        experts.count <= MAX_EXPERTS
        and top <= MAX_TOP
        and experts.hidden % 8 == 0
        and (gate is None or (gate.dtype == torch.bfloat16 and _aligned(gate)))
    )


def takes_rows(x: Tensor) -> bool:
    """Whether so many tokens fit, and these rows can be read 16 bytes at a time."""
    return (
        0 < x.shape[0] <= FEW_ROWS
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
    )


def joins(experts: ExpertWeights, shared: SharedExpert | None) -> bool:
    """Whether the shared expert can be one among the others: plain weights of the same dtype and size, silu,
    no biases.
    """
    return (
        shared is not None
        and experts.layout == shared.gate_up.layout == shared.down.layout == PLAIN
        and shared.down.shape[1] == experts.intermediate
        and experts.activation == "silu"
        and experts.gate_up_bias is None
        and experts.down_bias is None
        and all(
            weight.tensors[0].dtype == experts.gate_up.dtype and _aligned(weight.tensors[0])
            for weight in (shared.gate_up, shared.down)
        )
    )


def choose(x: Tensor, router: Router, experts: int, positions: Tensor | None) -> Choice:
    """The router's choice for x [T, H], made where the sort is, if the kernel knows the rules."""
    logits = router_logits(x, router)
    if logits.shape[1] == experts and takes_rules(experts, router.routing, router.correction):
        return Choice(router.routing, logits, router.correction)
    given = route_with(logits, router.routing, router.correction, positions)
    return Choice(router.routing, given=given)


def launch(
    x: Tensor,
    experts: ExpertWeights,
    choice: Choice,
    shared: SharedExpert | None,
    positions: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    early: bool = True,
) -> Tensor:
    """The layer's result [T, H]; with `residual`, rows as `takes_rows` wants them, it is added to that, which
    is returned.

    positions: tokens with a negative one choose nobody. early: launches start before those ahead have
    finished. Raises RuntimeError if one fails.
    """
    made = _sort(x, experts, choice, positions, shared if joins(experts, shared) else None, early)
    first = second = dense = None
    if made.joined is not None:
        first, second = made.joined.gate_up.tensors[0], made.joined.down.tensors[0]
    elif shared is not None:
        dense = linear(linear_silu_and_mul(x, shared.gate_up), shared.down)
    inner = gate_up(x, experts, made.tiles, made.slots, made.shape, first, early=early)
    wide = made.shape == FEW and x.shape[0] >= WIDE_TOKENS
    results = down(inner, experts, made.tiles, WIDE_DOWN if wide else made.shape, second, early=early)
    return _combine(x, results, made, experts.count, positions, dense, shared, residual, early)


def _sort(
    x: Tensor,
    experts: ExpertWeights,
    choice: Choice,
    positions: Tensor | None,
    joined: SharedExpert | None,
    early: bool,
) -> _Sorted:
    tokens, device, top = x.shape[0], x.device, choice.routing.top_k
    slots, members = (top, experts.count) if joined is None else (top + 1, experts.count + 1)
    shape = shape_for(tokens * top, experts, x.dtype)
    tiles = empty_tiles(tokens * slots, members, shape.rows, device)
    weights, chosen = choice.given or (
        torch.empty((tokens, top), dtype=torch.float32, device=device),
        torch.empty((tokens, top), dtype=torch.int32, device=device),
    )
    arguments = _Sort(
        logits=_address(choice.logits),
        positions=_address(positions),
        weights=weights.data_ptr(),
        chosen=chosen.data_ptr(),
        tile_experts=tiles.experts.data_ptr(),
        tile_pairs=tiles.pairs.data_ptr(),
        tiles=tiles.used.data_ptr(),
        rules=rules(experts.count, choice.routing, choice.correction),
        logits_pitch=0 if choice.logits is None else choice.logits.stride(0),
        tokens=tokens,
        slots=slots,
        size=shape.rows,
    )
    code = _functions(device)[0](ctypes.byref(arguments), early, _stream(device))
    if code != 0:
        raise RuntimeError(
            f"choice of {top} of {experts.count} experts by {tokens} tokens: CUDA error {code}"
        )
    return _Sorted(weights, chosen, tiles, shape, slots, joined)


def _combine(
    x: Tensor,
    results: Tensor,
    made: _Sorted,
    experts: int,
    positions: Tensor | None,
    dense: Tensor | None,
    shared: SharedExpert | None,
    residual: Tensor | None,
    early: bool,
) -> Tensor:
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device) if residual is None else residual
    rows = dense if made.joined is None else results.view(tokens, made.slots, hidden)[:, -1]
    arguments = _Combine(
        results=results.data_ptr(),
        weights=made.weights.data_ptr(),
        chosen=made.chosen.data_ptr(),
        positions=None if made.joined is None else _address(positions),
        shared=_address(rows),
        x=x.data_ptr(),
        gate=None if shared is None else _address(shared.gate),
        out=out.data_ptr(),
        shared_pitch=0 if rows is None else rows.stride(0),
        x_pitch=x.stride(0),
        out_pitch=out.stride(0),
        tokens=tokens,
        top=made.chosen.shape[1],
        slots=made.slots,
        experts=experts,
        hidden=hidden,
        adds=residual is not None,
    )
    code = _functions(x.device)[1](ctypes.byref(arguments), early, _stream(x.device))
    if code != 0:
        raise RuntimeError(f"sum over {tuple(made.chosen.shape)} experts: CUDA error {code}")
    return out


def _aligned(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _functions(device: torch.device) -> "tuple[ctypes._FuncPointer, ctypes._FuncPointer]":
    """The sort and the sum."""
    kernels = library(describe(device).capability)
    sort, combine = kernels.quickturn_moe_mid_sort, kernels.quickturn_moe_mid_combine
    sort.argtypes = [ctypes.POINTER(_Sort), ctypes.c_int, ctypes.c_void_p]
    combine.argtypes = [ctypes.POINTER(_Combine), ctypes.c_int, ctypes.c_void_p]
    sort.restype = combine.restype = ctypes.c_int
    return sort, combine
