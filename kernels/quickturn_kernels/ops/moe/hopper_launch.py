"""One mixture of experts over few tokens on a Hopper GPU: the launch of csrc/cuda/moe_decode.cu."""

import ctypes
from functools import cache

import torch
from torch import Tensor

from quickturn_kernels.cuda_build import library
from quickturn_kernels.ops.fp8_linear.hopper_launch import HOPPER_BLOCK
from quickturn_kernels.ops.linear import FEW_ROWS, PLAIN, LinearWeight
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe.hopper_route import MAX_EXPERTS, MAX_TOP, Rules, rules
from quickturn_kernels.ops.moe.hopper_route import takes as takes_rules
from quickturn_kernels.ops.moe.weights import FP8_SIDE, ExpertWeights, Router, SharedExpert
from quickturn_kernels.platform import describe
from quickturn_kernels.triton_common import zeroed_counters

ROUTER_ROWS = 4
GRANULE = 64

_POINTERS = (
    *("x", "router", "router_bias", "positions", "chosen", "weights"),
    *("gate_up", "down", "gate_up_bias", "down_bias", "shared_gate_up", "shared_down"),
    *("gate_up_scale", "down_scale", "shared_gate_up_scale", "shared_down_scale"),
    *("shared_gate", "logits", "between", "out", "counters"),
)
_INTEGERS = (
    *("tokens", "hidden", "inner", "shared_inner", "inner_pitch", "stages", "oss"),
    *("shared_gate_up_pitch", "shared_down_pitch", "shared_permuted"),
)


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("rules", Rules),
        ("x_pitch", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in _INTEGERS),
    ]


def takes(x: Tensor, experts: ExpertWeights, top: int, shared: SharedExpert | None) -> bool:
    """Whether `launch` can do this layer: 1 to 64 bfloat16 tokens; experts, the shared one too, of bfloat16
    with sizes in multiples of 64, or of e4m3 with block scales, in multiples of 128.
    """
    biases = (experts.gate_up_bias, experts.down_bias)
    fp8 = experts.layout == FP8_BLOCK
    multiple = FP8_SIDE if fp8 else GRANULE
    return (
        0 < x.shape[0] <= FEW_ROWS
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.data_ptr() % 16 == 0
        and (fp8 or (experts.layout == PLAIN and experts.gate_up.dtype == torch.bfloat16))
        and experts.hidden % multiple == 0
        and experts.intermediate % multiple == 0
        and experts.count <= MAX_EXPERTS
        and top <= MAX_TOP
        and all(bias is None or (bias.dtype == x.dtype and bias.is_contiguous()) for bias in biases)
        and (shared is None or _takes_shared(shared, experts, multiple))
    )


def _takes_shared(shared: SharedExpert, experts: ExpertWeights, multiple: int) -> bool:
    gate, weights = shared.gate, (shared.gate_up, shared.down)
    layouts = (FP8_BLOCK, HOPPER_BLOCK) if experts.layout == FP8_BLOCK else (PLAIN,)
    return (
        shared.gate_up.layout == shared.down.layout
        and shared.down.layout in layouts
        and all(weight.tensors[0].dtype == experts.gate_up.dtype for weight in weights)
        and all(weight.tensors[0].is_contiguous() for weight in weights)
        and shared.down.shape[1] % multiple == 0
        and (gate is None or (gate.dtype == torch.bfloat16 and gate.is_contiguous()))
    )


def takes_router(x: Tensor, router: Router) -> bool:
    """Whether the router can be computed in the same launch: plain bfloat16, no groups."""
    weight = router.weight
    return (
        takes_rules(weight.shape[0], router.routing, router.correction)
        and weight.layout == PLAIN
        and weight.dtype == torch.bfloat16
        and weight.tensors[0].is_contiguous()
        and weight.shape[0] + 1 <= ROUTER_ROWS * describe(x.device).units
        and (router.bias is None or router.bias.dtype == torch.bfloat16)
    )


def launch(
    x: Tensor,
    experts: ExpertWeights,
    shared: SharedExpert | None,
    *,
    choice: tuple[Tensor, Tensor] | None = None,
    router: Router | None = None,
    positions: Tensor | None = None,
    early: bool = True,
) -> Tensor:
    """The layer's result, [T, H]. Either `choice` (weights, experts; as for `moe`) or `router` is given.

    early: start before the kernel ahead has finished. Raises RuntimeError if the launch fails.
    """
    tokens, hidden = x.shape
    device = x.device
    if choice is not None:
        top = choice[1].shape[1]
    else:
        assert router is not None
        top = router.routing.top_k
    shared_inner = 0 if shared is None else shared.down.shape[1]
    pitch = max(experts.intermediate, shared_inner)
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=device)
    between = torch.empty((tokens, top + 1, pitch), dtype=x.dtype, device=device)
    logits = torch.empty((tokens, experts.count + 1), dtype=torch.float32, device=device)
    entry, stages_for = _functions(device, experts.layout == FP8_BLOCK)
    stages = stages_for(tokens, top)
    chosen_by = Rules(experts.count, top, 0, 0, 1.0, None)
    if router is not None:
        chosen_by = rules(experts.count, router.routing, router.correction)
    gate_up_scale, gate_up_pitch = _scale(None if shared is None else shared.gate_up)
    down_scale, down_pitch = _scale(None if shared is None else shared.down)
    arguments = _Arguments(
        x=x.data_ptr(),
        router=None if router is None else router.weight.tensors[0].data_ptr(),
        router_bias=None if router is None else _address(router.bias),
        positions=_address(positions),
        weights=None if choice is None else choice[0].data_ptr(),
        chosen=None if choice is None else choice[1].data_ptr(),
        gate_up=experts.gate_up.data_ptr(),
        down=experts.down.data_ptr(),
        gate_up_bias=_address(experts.gate_up_bias),
        down_bias=_address(experts.down_bias),
        shared_gate_up=None if shared is None else shared.gate_up.tensors[0].data_ptr(),
        shared_down=None if shared is None else shared.down.tensors[0].data_ptr(),
        gate_up_scale=_address(experts.gate_up_scale),
        down_scale=_address(experts.down_scale),
        shared_gate_up_scale=gate_up_scale,
        shared_gate_up_pitch=gate_up_pitch,
        shared_down_scale=down_scale,
        shared_down_pitch=down_pitch,
        shared_permuted=shared is not None and shared.down.layout == HOPPER_BLOCK,
        shared_gate=None if shared is None else _address(shared.gate),
        logits=logits.data_ptr(),
        between=between.data_ptr(),
        out=out.data_ptr(),
        counters=zeroed_counters(device, 2).data_ptr(),
        rules=chosen_by,
        x_pitch=x.stride(0),
        tokens=tokens,
        hidden=hidden,
        inner=experts.intermediate,
        shared_inner=shared_inner,
        inner_pitch=pitch,
        stages=stages,
        oss=experts.activation == "gpt_oss",
    )
    code = entry(
        ctypes.byref(arguments),
        describe(device).units,
        early,
        torch.cuda.current_stream(device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"mixture of {experts.count} experts over {tuple(x.shape)}: CUDA error {code}")
    return out


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _scale(weight: LinearWeight | None) -> tuple[int | None, int]:
    """The address of a weight's block scales and the elements between their rows."""
    if weight is None or weight.layout == PLAIN:
        return None, 0
    return weight.tensors[1].data_ptr(), weight.tensors[1].stride(0)


@cache
def _functions(device: torch.device, fp8: bool) -> "tuple[ctypes._FuncPointer, ctypes._FuncPointer]":
    loaded = library(describe(device).capability)
    entry, stages = loaded.quickturn_moe_few_tokens, loaded.quickturn_moe_stages
    if fp8:
        entry, stages = loaded.quickturn_moe_fp8_few_tokens, loaded.quickturn_moe_fp8_stages
    entry.argtypes = [ctypes.POINTER(_Arguments), ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    stages.argtypes = [ctypes.c_int, ctypes.c_int]
    entry.restype = stages.restype = ctypes.c_int
    return entry, stages
