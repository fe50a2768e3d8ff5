"""Mixtures of experts over a few tokens on a Hopper GPU: the launches of csrc/cuda/moe_few.cu, and for e4m3
experts those of moe_few_fp8.cu.
"""

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.fp8_linear.hopper_launch import HOPPER_BLOCK
from quickturn_kernels.ops.linear import PLAIN, LinearWeight
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe.hopper_route import Rules, rules
from quickturn_kernels.ops.moe.hopper_route import takes as takes_rules
from quickturn_kernels.ops.moe.weights import FP8_SIDE, ExpertWeights, Router, SharedExpert
from quickturn_kernels.platform import describe

MAX_TOKENS = 2
"""kFewTokens of csrc/cuda/moe_few.cuh: with more other launches are as fast."""

UNIT = 16
"""Sizes are multiples of this."""

SHARED_MEMORY = 200_000
"""Bytes of one block, for what all tokens need of it and for one stage of one warp."""

PREFETCH_TOKENS = 1
"""Up to so many tokens the second halves of their experts fit into L2 beside what else is read."""

_POINTERS = (
    *("x", "residual", "norm", "router", "router_bias", "positions", "gate_up", "down", "gate_up_bias"),
    *("down_bias", "shared_gate_up", "shared_down", "shared_gate", "gate_up_scale", "down_scale"),
    *("shared_gate_up_scale", "shared_down_scale", "logits", "gates", "normed", "between", "out"),
)
_INTEGERS = (
    *("tokens", "hidden", "inner", "shared_inner", "pitch", "gate_up_pitch", "down_pitch"),
    *("shared_gate_up_pitch", "shared_down_pitch", "shared_permuted", "oss", "wide", "prefetch"),
)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("rules", Rules),
        *((name, ctypes.c_longlong) for name in ("x_pitch", "residual_pitch")),
        *((name, ctypes.c_int) for name in _INTEGERS),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("gate_stages", "down_stages")),
    ]


@dataclass(frozen=True)
class Stream:
    """The residual stream [T, H] that gets the layer's result, and the norm ahead of the layer."""

    residual: Tensor
    norm: Tensor
    eps: float


def takes(experts: ExpertWeights, router: Router, shared: SharedExpert | None) -> bool:
    """Whether `launch` can do this layer for some tokens: a plain bfloat16 router without groups; experts,
    the shared one too, of bfloat16 or of e4m3 with block scales, with sizes in multiples of 16 (a hidden size
    of 128 with scales, so that no block of them belongs to two experts).
    """
    fp8 = experts.layout == FP8_BLOCK
    biases = (experts.gate_up_bias, experts.down_bias, router.bias)
    return (
        takes_rules(experts.count, router.routing, router.correction)
        and router.weight.layout == PLAIN
        and router.weight.dtype == torch.bfloat16
        and router.weight.tensors[0].is_contiguous()
        and router.weight.shape[0] == experts.count
        and (fp8 or (experts.layout == PLAIN and experts.gate_up.dtype == torch.bfloat16))
        and experts.hidden % (FP8_SIDE if fp8 else UNIT) == 0
        and experts.intermediate % UNIT == 0
        and all(bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous()) for bias in biases)
        and (shared is None or _takes_shared(shared, fp8))
    )


def _takes_shared(shared: SharedExpert, fp8: bool) -> bool:
    gate, weights = shared.gate, (shared.gate_up, shared.down)
    layouts = (FP8_BLOCK, HOPPER_BLOCK) if fp8 else (PLAIN,)
    return (
        shared.gate_up.layout == shared.down.layout
        and shared.down.layout in layouts
        and all(fp8 or weight.tensors[0].dtype == torch.bfloat16 for weight in weights)
        and all(weight.tensors[0].is_contiguous() for weight in weights)
        and shared.down.shape[1] % UNIT == 0
        and (gate is None or (gate.dtype == torch.bfloat16 and gate.is_contiguous()))
    )


def takes_rows(x: Tensor, experts: ExpertWeights, router: Router, shared: SharedExpert | None) -> bool:
    """Whether so many tokens fit, and these rows can be read 16 bytes at a time."""
    tokens = x.shape[0]
    return (
        0 < tokens <= MAX_TOKENS
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and _fits(tokens, router.routing.top_k + 1, experts, _pitch(experts, shared))
    )


def _fits(tokens: int, slots: int, experts: ExpertWeights, pitch: int) -> bool:
    """Whether a block of each launch has room."""
    between = 2 * tokens * slots * pitch
    if experts.layout == FP8_BLOCK:
        return between <= SHARED_MEMORY
    return max((2 * tokens + 4) * experts.hidden, between + 4 * max(pitch, 2048)) <= SHARED_MEMORY


def takes_norm(weight: Tensor) -> bool:
    """Whether the kernel can read a norm's weight, 16 bytes at a time."""
    return (
        weight.dtype in (torch.bfloat16, torch.float32)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def launch(
    x: Tensor | None,
    router: Router,
    experts: ExpertWeights,
    shared: SharedExpert | None,
    positions: Tensor | None,
    stream: Stream | None = None,
    *,
    early: bool = True,
) -> Tensor:
    """The layer's result [T, H], of x. With `stream`, x is added to it, the layer's input is its norm, the
    result is added, too, and the stream is returned.

    early: launches start before those ahead have finished. Raises RuntimeError if one fails.
    """
    rows = x if stream is None else stream.residual
    assert rows is not None
    tokens, hidden, device = rows.shape[0], rows.shape[1], rows.device
    top, pitch = router.routing.top_k, _pitch(experts, shared)
    normed = torch.empty((tokens, hidden), dtype=rows.dtype, device=device)
    between = torch.empty((tokens, top + 1, pitch), dtype=rows.dtype, device=device)
    scores = torch.empty((tokens, experts.count + 1), dtype=torch.float32, device=device)
    out = rows if stream is not None else torch.empty_like(normed)
    gate_up_scale, gate_up_pitch = _scale(None if shared is None else shared.gate_up)
    down_scale, down_pitch = _scale(None if shared is None else shared.down)
    arguments = _Arguments(
        x=_address(x),
        residual=None if stream is None else stream.residual.data_ptr(),
        norm=None if stream is None else stream.norm.data_ptr(),
        router=router.weight.tensors[0].data_ptr(),
        router_bias=_address(router.bias),
        positions=_address(positions),
        gate_up=experts.gate_up.data_ptr(),
        down=experts.down.data_ptr(),
        gate_up_bias=_address(experts.gate_up_bias),
        down_bias=_address(experts.down_bias),
        shared_gate_up=None if shared is None else shared.gate_up.tensors[0].data_ptr(),
        shared_down=None if shared is None else shared.down.tensors[0].data_ptr(),
        shared_gate=None if shared is None else _address(shared.gate),
        gate_up_scale=_address(experts.gate_up_scale),
        down_scale=_address(experts.down_scale),
        shared_gate_up_scale=gate_up_scale,
        shared_down_scale=down_scale,
        logits=scores.data_ptr(),
        gates=scores.data_ptr() + 4 * tokens * experts.count,
        normed=normed.data_ptr(),
        between=between.data_ptr(),
        out=None if stream is not None else out.data_ptr(),
        rules=rules(experts.count, router.routing, router.correction),
        x_pitch=0 if x is None else x.stride(0),
        residual_pitch=0 if stream is None else stream.residual.stride(0),
        tokens=tokens,
        hidden=hidden,
        inner=experts.intermediate,
        shared_inner=0 if shared is None else shared.down.shape[1],
        pitch=pitch,
        gate_up_pitch=0 if experts.gate_up_scale is None else experts.gate_up_scale.shape[2],
        down_pitch=0 if experts.down_scale is None else experts.down_scale.shape[2],
        shared_gate_up_pitch=gate_up_pitch,
        shared_down_pitch=down_pitch,
        shared_permuted=shared is not None and shared.down.layout == HOPPER_BLOCK,
        oss=experts.activation == "gpt_oss",
        wide=stream is not None and stream.norm.dtype == torch.float32,
        prefetch=tokens <= PREFETCH_TOKENS,
        eps=0.0 if stream is None else stream.eps,
    )
    code = _function(device, experts.layout == FP8_BLOCK)(
        ctypes.byref(arguments),
        describe(device).units,
        early,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"mixture of {experts.count} experts over {tuple(rows.shape)}: CUDA error {code}")
    return out


def _pitch(experts: ExpertWeights, shared: SharedExpert | None) -> int:
    return max(experts.intermediate, 0 if shared is None else shared.down.shape[1])


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _scale(weight: LinearWeight | None) -> tuple[int | None, int]:
    """The address of a weight's block scales and the elements between their rows."""
    if weight is None or weight.layout == PLAIN:
        return None, 0
    return weight.tensors[1].data_ptr(), weight.tensors[1].stride(0)


@cache
def _function(device: torch.device, fp8: bool) -> "ctypes._FuncPointer":
    kernels = library(describe(device).capability)
    function = kernels.quickturn_moe_few_fp8 if fp8 else kernels.quickturn_moe_few
    whole = ctypes.c_int
    function.argtypes = [ctypes.POINTER(_Arguments), whole, whole, ctypes.c_void_p]
    function.restype = whole
    return function
