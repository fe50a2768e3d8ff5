"""Cases of routing and experts: ragged sizes, padding, experts nobody or everybody chose, groups, biases."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

from quickturn_kernels.numerics.check import Case, Result
from quickturn_kernels.ops.linear import PLAIN, prepare_linear, rows_class
from quickturn_kernels.ops.linear.fp8 import FP8_BLOCK
from quickturn_kernels.ops.moe import (
    ExpertWeights,
    Router,
    Routing,
    SharedExpert,
    moe,
    moe_block,
    prepare_experts,
    prepare_shared_expert,
    residual_moe_block,
    route_with,
)
from quickturn_kernels.ops.moe.weights import blocks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

ROUTES = (
    (5, 256, FP32, Routing(8), ""),
    (9, 60, BF16, Routing(4, normalize=False, scale=1.7), "padding"),
    (7, 128, FP32, Routing(6, "sigmoid", groups=8, top_groups=3, scale=2.5), "bias"),
    (3, 160, FP32, Routing(6, normalize=False, groups=8, top_groups=3, group_score="max"), ""),
    (4, 48, FP32, Routing(5, "sigmoid", groups=3, top_groups=2), "bias padding"),
    (6, 32, FP16, Routing(4, "softmax_after"), ""),
    (6, 512, FP32, Routing(10, "sigmoid"), "bias"),
    (5, 24, FP32, Routing(8), "ties"),
    (5, 24, FP32, Routing(8, "sigmoid", groups=4, top_groups=2), "ties"),
    (1, 8, FP32, Routing(8), ""),
    (0, 16, FP32, Routing(2), ""),
)
"""(tokens, experts, dtype of the logits, routing, options)"""


@dataclass(frozen=True)
class Layer:
    """What a case is made of. options: words of "biased", "shared", "gated", "fp8", "one" (all to one
    expert), "outside" (some choices are nobody), "oss".
    """

    tokens: int
    hidden: int
    inner: int
    experts: int
    top: int
    dtype: torch.dtype
    options: str = ""

    def __str__(self) -> str:
        name = f"{self.tokens} x {self.hidden}, {self.top} of {self.experts} x {self.inner}"
        return f"{name} {str(self.dtype).removeprefix('torch.')} {self.options}".strip()


LAYERS = (
    Layer(0, 64, 32, 4, 2, FP32),
    Layer(1, 128, 64, 8, 2, BF16, "shared gated"),
    Layer(3, 96, 40, 5, 3, FP32, "shared"),
    Layer(5, 64, 32, 6, 2, FP32, "oss biased"),
    Layer(40, 72, 48, 4, 2, FP16, "outside"),
    Layer(33, 64, 32, 8, 1, BF16, "one"),
    Layer(70, 128, 32, 2, 2, BF16, "shared gated"),
    Layer(100, 64, 96, 3, 2, FP32, "outside"),
    Layer(6, 192, 128, 4, 2, BF16, "fp8 shared"),
    Layer(80, 256, 128, 2, 1, BF16, "fp8"),
    Layer(6, 512, 256, 16, 4, BF16, "outside shared gated"),
    Layer(64, 256, 128, 8, 4, BF16, "shared"),
    Layer(17, 256, 96, 16, 8, BF16, "one oss biased"),
)


def moe_cases() -> tuple[Case, ...]:
    """Cases of route, moe, moe_block and residual_moe_block."""
    found = [route_case(*one) for one in ROUTES]
    for layer in LAYERS:
        found += layer_cases(layer)
    return tuple(found)


def route_case(tokens: int, experts: int, dtype: torch.dtype, routing: Routing, options: str) -> Case:
    """The case of one call of route. options: words of "bias", "padding", "ties"."""
    name = f"{tokens} x {experts} {routing.scoring} {routing.top_k} {routing.groups} {options}".strip()
    return Case("route", name, dtype, {}, partial(_route, tokens, experts, dtype, routing, options))


def layer_cases(layer: Layer) -> tuple[Case, ...]:
    """moe, moe_block and residual_moe_block of one layer."""
    plain = {"prepare_linear": "reference", "linear": "reference", "linear_silu_and_mul": "reference"}
    layout = FP8_BLOCK if "fp8" in layer.options else PLAIN
    traits = {"layout": layout, "rows": rows_class(layer.tokens)}
    block = {**plain, "route": "reference", "moe": "reference"}
    stream = {**block, "moe_block": "reference", "rms_norm": "reference", "add_rms_norm": "reference"}
    return (
        Case("moe", str(layer), layer.dtype, traits, partial(_moe, layer), plain),
        Case("moe_block", str(layer), layer.dtype, traits, partial(_moe_block, layer), block),
        Case("residual_moe_block", str(layer), layer.dtype, traits, partial(_stream, layer), stream),
    )


def _route(
    tokens: int,
    experts: int,
    dtype: torch.dtype,
    routing: Routing,
    options: str,
    generator: Generator,
    device: torch.device,
) -> Result:
    wide = torch.full((tokens, experts + 8), float("nan"))
    wide[:, :experts] = torch.randn(tokens, experts, generator=generator) * 2
    if "ties" in options:
        wide = wide.round()
    logits = wide.to(dtype).to(device)[:, :experts]
    bias = torch.randn(experts, generator=generator).to(device) if "bias" in options else None
    positions = None
    if "padding" in options:
        positions = torch.arange(tokens, device=device)
        positions[1::2] = -1
    weights, chosen = route_with(logits, routing, bias, positions)
    return Result({"weights": weights, "chosen": chosen})


def _random(generator: Generator, device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).to(dtype).to(device)


def _x(layer: Layer, generator: Generator, device: torch.device) -> Tensor:
    """Rows that lie apart in memory, NaN between them."""
    wide = torch.full((layer.tokens, layer.hidden + 16), float("nan"))
    wide[:, : layer.hidden] = torch.randn(layer.tokens, layer.hidden, generator=generator)
    return wide.to(layer.dtype).to(device)[:, : layer.hidden]


def _experts(layer: Layer, generator: Generator, device: torch.device) -> ExpertWeights:
    count, hidden, inner = layer.experts, layer.hidden, layer.inner
    make = partial(_random, generator, device)
    if "fp8" in layer.options:
        stored = torch.float8_e4m3fn
        return prepare_experts(
            (make(BF16, count, 2 * inner, hidden) * 64).to(stored),
            (make(BF16, count, hidden, inner) * 64).to(stored),
            gate_up_scale=torch.rand(count, 2 * inner // 128, blocks(hidden), generator=generator).to(device)
            / 32,
            down_scale=torch.rand(count, blocks(hidden), blocks(inner), generator=generator).to(device) / 32,
        )
    biased = "biased" in layer.options
    return prepare_experts(
        make(layer.dtype, count, 2 * inner, hidden),
        make(layer.dtype, count, hidden, inner),
        gate_up_bias=make(layer.dtype, count, 2 * inner) * inner**0.5 if biased else None,
        down_bias=make(layer.dtype, count, hidden) if biased else None,
        activation="gpt_oss" if "oss" in layer.options else "silu",
    )


def _shared(layer: Layer, generator: Generator, device: torch.device) -> SharedExpert | None:
    if "shared" not in layer.options:
        return None
    make = partial(_random, generator, device, layer.dtype)
    gate = make(1, layer.hidden) if "gated" in layer.options else None
    inner = layer.inner * (2 if layer.tokens % 2 else 1)
    return prepare_shared_expert(make(2 * inner, layer.hidden), make(layer.hidden, inner), gate)


def _moe(layer: Layer, generator: Generator, device: torch.device) -> Result:
    x = _x(layer, generator, device)
    experts, shared = _experts(layer, generator, device), _shared(layer, generator, device)
    scores = torch.rand(layer.tokens, layer.experts, generator=generator)
    if "one" in layer.options:
        scores[:, 1] += 1.0
    weights, chosen = scores.topk(layer.top)
    if "outside" in layer.options:
        chosen[::2, 0], chosen[1::3, -1] = -1, layer.experts + 2
        weights[::2, 0] = float("nan")
    out = moe(x, experts, weights.to(device), chosen.to(torch.int32).to(device), shared=shared)
    return _result(out, x)


def _result(out: Tensor, x: Tensor) -> Result:
    """Half precision rounds three times on the way, so that only a row as a whole is close."""
    return Result({"out": out, "x": x}, {} if out.dtype == FP32 else {"out": _rows_agree})


def _rows_agree(want: Tensor, got: Tensor) -> bool:
    if want.dtype != got.dtype or want.shape != got.shape:
        return False
    off = (got.double() - want.double()).norm(dim=-1)
    limit = 2e-3
    if want.dtype == BF16:
        # Triton's interpreter cuts bfloat16 off where a GPU rounds.
        limit = 1.2e-2 if want.device.type == "cuda" else 4e-2
    return bool((off <= limit * want.double().norm(dim=-1)).all())


def _router(layer: Layer, generator: Generator, device: torch.device) -> tuple[Router, Tensor | None]:
    """And the positions, if some tokens are padding."""
    routing = Routing(layer.top, "softmax_after" if "oss" in layer.options else "softmax")
    weight = prepare_linear(_random(generator, device, layer.dtype, layer.experts, layer.hidden))
    bias = _random(generator, device, layer.dtype, layer.experts) if "biased" in layer.options else None
    positions = None
    if "outside" in layer.options:
        positions = torch.arange(layer.tokens, device=device)
        positions[::3] = -1
    return Router(weight, routing, bias), positions


def _stream(layer: Layer, generator: Generator, device: torch.device) -> Result:
    residual, branch = _x(layer, generator, device), _x(layer, generator, device)
    experts, shared = _experts(layer, generator, device), _shared(layer, generator, device)
    router, positions = _router(layer, generator, device)
    wide = layer.tokens % 2 and layer.dtype != FP16
    norm = 1 + 0.1 * torch.randn(layer.hidden, generator=generator)
    norm = norm.to(device).to(FP32 if wide else layer.dtype)
    added = None if "gated" in layer.options and layer.tokens == 1 else branch
    residual_moe_block(residual, added, norm, 1e-6, router, experts, shared=shared, positions=positions)
    if positions is not None:
        residual = residual.masked_fill((positions < 0)[:, None], 0.0)
    return Result(
        {"residual": residual, "branch": branch},
        {} if layer.dtype == FP32 else {"residual": _rows_agree},
    )


def _moe_block(layer: Layer, generator: Generator, device: torch.device) -> Result:
    x = _x(layer, generator, device)
    experts, shared = _experts(layer, generator, device), _shared(layer, generator, device)
    router, positions = _router(layer, generator, device)
    out = moe_block(x, router, experts, shared=shared, positions=positions)
    if positions is not None:
        # What padding gets from the shared expert is nobody's business.
        out = out.masked_fill((positions < 0)[:, None], 0.0)
    return _result(out, x)
