"""What a mixture-of-experts layer is made of: its experts, the expert that every token takes, its router."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from quickturn_kernels.ops.linear import PLAIN, LinearWeight, prepare_fp8_linear, prepare_linear
from quickturn_kernels.ops.linear.fp8 import FP8, FP8_BLOCK

Activation = Literal["silu", "gpt_oss"]
"""`silu`: silu(gate) * up. `gpt_oss`: gate at most 7, up in -7..7, gate * sigmoid(1.702 gate) * (up + 1)."""

Scoring = Literal["softmax", "sigmoid", "softmax_after"]
GroupScore = Literal["top2", "max"]

FP8_SIDE = 128
"""Rows and columns of a block of an fp8 weight that share a factor."""

GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """E experts of one layer, as `prepare_experts` made them.

    gate_up [E, 2I, H], down [E, H, I]. Biases [E, 2I] and [E, H] or None. Scales, with layout `fp8_block`,
    float32 [E, ceil(2I / 128), ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)].
    """

    layout: str
    activation: Activation
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    gate_up_scale: Tensor | None
    down_scale: Tensor | None

    @property
    def count(self) -> int:
        """E."""
        return self.gate_up.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.gate_up.shape[2]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.down.shape[2]


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The expert that every token takes: gate_up [2I', H] and down [H, I'] for `linear`, always with silu.

    gate: [1, H]; the result is multiplied by sigmoid(x @ gate.T), or by 1 where it is None.
    """

    gate_up: LinearWeight
    down: LinearWeight
    gate: Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """How scores become a choice; see `route`."""

    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Router:
    """weight: [E, H]. bias: [E], added to the logits. correction: float32 [E], added to the scores for the
    choice alone.
    """

    weight: LinearWeight
    routing: Routing
    bias: Tensor | None = None
    correction: Tensor | None = None


def prepare_experts(
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = "silu",
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> ExpertWeights:
    """Experts for `moe` and `moe_block`.

    gate_up: [E, 2I, H], of each expert the gate's rows first, then up's. down: [E, H, I]. Both contiguous,
    bfloat16, float16 or float32, or float8_e4m3fn with scales of 128 x 128 blocks, float32
    [E, ceil(2I / 128), ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)]: weight = stored value * scale of
    its block; I must then be a multiple of 128. Biases: [E, 2I] and [E, H].

    The tensors are kept, not copied: a loader makes `torch.empty(E, 2I, H)` on the device, fills
    `gate_up[e, :I]`, `gate_up[e, I:]` and `down[e]` expert by expert in any order, before or after this call,
    and needs no second copy of a layer at any time. Checkpoints whose gate and up rows alternate (gpt_oss:
    [E, H, 2I], gate even, up odd) go in as `w.mT[:, ::2]` and `w.mT[:, 1::2]`, their biases likewise.
    Raises ValueError where shapes or dtypes don't fit.
    """
    count, double, hidden = gate_up.shape
    intermediate = double // 2
    if double % 2 or down.shape != (count, hidden, intermediate) or down.dtype != gate_up.dtype:
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} {gate_up.dtype} and down {tuple(down.shape)} {down.dtype} "
            "don't belong together: [E, 2I, H] and [E, H, I] of one dtype"
        )
    if not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("experts must be contiguous")
    _check_shape("gate_up_bias", gate_up_bias, (count, double))
    _check_shape("down_bias", down_bias, (count, hidden))
    scaled = gate_up.dtype == FP8
    if scaled != (gate_up_scale is not None) or scaled != (down_scale is not None):
        raise ValueError(f"scales are for float8_e4m3fn weights, which need them; these are {gate_up.dtype}")
    if scaled:
        if intermediate % FP8_SIDE:
            raise ValueError(f"blocks of {FP8_SIDE} rows don't divide {intermediate} rows of the gate")
        _check_shape("gate_up_scale", gate_up_scale, (count, double // FP8_SIDE, blocks(hidden)))
        _check_shape("down_scale", down_scale, (count, blocks(hidden), blocks(intermediate)))
    return ExpertWeights(
        FP8_BLOCK if scaled else PLAIN,
        activation,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        gate_up_scale,
        down_scale,
    )


def prepare_shared_expert(
    gate_up: Tensor,
    down: Tensor,
    gate: Tensor | None = None,
    *,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
) -> SharedExpert:
    """The shared expert from plain tensors: gate_up [2I', H] (the gate's rows first), down [H, I'], gate
    [1, H] or None.

    Scales: of float8_e4m3fn weights, as for `prepare_fp8_linear`.
    """
    if gate_up_scale is None or down_scale is None:
        return SharedExpert(prepare_linear(gate_up), prepare_linear(down), gate)
    return SharedExpert(
        prepare_fp8_linear(gate_up, gate_up_scale), prepare_fp8_linear(down, down_scale), gate
    )


def blocks(size: int) -> int:
    """Blocks of 128 that cover `size`."""
    return -(-size // FP8_SIDE)


def _check_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
