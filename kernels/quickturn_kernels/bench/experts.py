"""What is measured of mixtures of experts: a layer of Qwen3.5-35B-A3B, of a small model elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import quickturn_kernels as kernels
from quickturn_kernels.bench.problem import Problem


@dataclass(frozen=True)
class Mixture:
    """Sizes of a layer; its shared expert is as large as any other."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


QWEN35 = Mixture(2048, 512, 256, 8)
SMALL = Mixture(256, 128, 16, 4)


def expert_problems(device: torch.device, dtype: torch.dtype) -> tuple[Problem, ...]:
    """route and moe, from one token to a long prompt."""
    on_gpu = device.type == "cuda"
    model = QWEN35 if on_gpu else SMALL
    found = []
    for tokens in (1, 8, 64, 512, 8192) if on_gpu else (1, 64):
        found += [_route(model, tokens, device), _moe(model, tokens, device, dtype)]
    return tuple(found)


def _route(model: Mixture, tokens: int, device: torch.device) -> Problem:
    def build() -> Callable[[], object]:
        return partial(kernels.route, torch.randn(tokens, model.experts, device=device), model.top_k)

    moved = tokens * (model.experts * 4 + model.top_k * 8)
    return Problem("route", f"{tokens} x {model.top_k} of {model.experts}", moved, 0, build)


def _moe(model: Mixture, tokens: int, device: torch.device, dtype: torch.dtype) -> Problem:
    weights, chosen = kernels.route(
        torch.randn(tokens, model.experts, generator=torch.Generator().manual_seed(tokens)), model.top_k
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def build() -> Callable[[], object]:
        hidden, inner = model.hidden, model.intermediate
        experts = kernels.prepare_experts(
            random(model.experts, 2 * inner, hidden), random(model.experts, hidden, inner)
        )
        shared = kernels.prepare_shared_expert(random(2 * inner, hidden), random(hidden, inner))
        x = random(tokens, hidden)
        return partial(kernels.moe, x, experts, weights.to(device), chosen.to(device), shared=shared)

    matrix = 3 * model.hidden * model.intermediate
    used = int(torch.unique(chosen).numel()) + 1
    moved = (used * matrix + 2 * tokens * model.hidden) * dtype.itemsize
    shape = f"{tokens} x {model.hidden}, {model.top_k} of {model.experts} x {model.intermediate}"
    return Problem("moe", shape, moved, 2 * tokens * (model.top_k + 1) * matrix, build)
