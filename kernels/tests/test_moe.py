"""Mixtures of experts against the layers of transformers and against plain loops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import quickturn_kernels as kernels

HIDDEN, INNER, EXPERTS, TOP = 64, 32, 12, 4


def _filled(module: torch.nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator) * 0.3
    return module


def _qwen(name: str) -> Callable[[int], tuple[Tensor, Tensor]]:
    def run(seed: int) -> tuple[Tensor, Tensor]:
        transformers = pytest.importorskip("transformers")
        if name == "qwen3_5_moe":
            from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

            config = transformers.models.qwen3_5_moe.Qwen3_5MoeTextConfig
            block = modeling.Qwen3_5MoeSparseMoeBlock
        elif name == "qwen3_next":
            from transformers.models.qwen3_next import modeling_qwen3_next as modeling

            config, block = transformers.Qwen3NextConfig, modeling.Qwen3NextSparseMoeBlock
        else:
            from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

            config, block = transformers.Qwen3MoeConfig, modeling.Qwen3MoeSparseMoeBlock
        sizes = {
            "hidden_size": HIDDEN,
            "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": 48,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP,
            "norm_topk_prob": True,
        }
        layer = _filled(block(config(**sizes)), seed)
        x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed))
        shared = None
        if hasattr(layer, "shared_expert"):
            expert = layer.shared_expert
            gate_up = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
            shared = kernels.prepare_shared_expert(
                gate_up, expert.down_proj.weight, layer.shared_expert_gate.weight
            )
        router = kernels.Router(kernels.prepare_linear(layer.gate.weight), kernels.Routing(TOP))
        experts = kernels.prepare_experts(layer.experts.gate_up_proj, layer.experts.down_proj)
        return layer(x[None])[0], kernels.moe_block(x, router, experts, shared=shared)

    return run


def _deepseek(seed: int) -> tuple[Tensor, Tensor]:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=TOP,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    )
    layer = _filled(modeling.DeepseekV3MoE(config), seed)
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed))
    routing = kernels.Routing(TOP, "sigmoid", groups=4, top_groups=2, scale=2.5)
    correction = layer.gate.e_score_correction_bias
    router = kernels.Router(kernels.prepare_linear(layer.gate.weight), routing, correction=correction)
    expert = layer.shared_experts
    gate_up = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
    shared = kernels.prepare_shared_expert(gate_up, expert.down_proj.weight)
    experts = kernels.prepare_experts(layer.experts.gate_up_proj, layer.experts.down_proj)
    return layer(x[None])[0], kernels.moe_block(x, router, experts, shared=shared)


def _gpt_oss(seed: int) -> tuple[Tensor, Tensor]:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt_oss import modeling_gpt_oss as modeling

    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP
    )
    layer = _filled(modeling.GptOssMLP(config), seed)
    x = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 2
    theirs = layer.experts

    def gate_first(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:, ::2], tensor[:, 1::2]], 1)

    experts = kernels.prepare_experts(
        gate_first(theirs.gate_up_proj.mT),
        theirs.down_proj.mT.contiguous(),
        gate_up_bias=gate_first(theirs.gate_up_proj_bias),
        down_bias=theirs.down_proj_bias,
        activation="gpt_oss",
    )
    router = kernels.Router(
        kernels.prepare_linear(layer.router.weight), kernels.Routing(TOP, "softmax_after"), layer.router.bias
    )
    return layer(x[None])[0][0], kernels.moe_block(x, router, experts)


LAYERS = {
    **{name: _qwen(name) for name in ("qwen3_moe", "qwen3_next", "qwen3_5_moe")},
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layer_of_transformers(name: str, seed: int) -> None:
    want, got = LAYERS[name](seed)
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
