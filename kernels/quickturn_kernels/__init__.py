"""Kernels for language model inference.

Each op is one typed function here; implementations of several tiers (PyTorch reference, Triton, CPU, ...)
register for it and the best that fits the machine and the call is taken. `python -m quickturn_kernels list`
prints them.
"""

from quickturn_kernels.ops.activation import gelu_tanh_and_mul, sigmoid_gate, silu_and_mul
from quickturn_kernels.ops.all_reduce import (
    PeerMemory,
    Peers,
    all_gather,
    all_reduce,
    all_reduce_add_rms_norm,
)
from quickturn_kernels.ops.attention import paged_attention_decode, paged_attention_prefill
from quickturn_kernels.ops.attention_partial import merge_attention, partial_attention_decode
from quickturn_kernels.ops.attention_step import rotary_attention_decode
from quickturn_kernels.ops.batch import DecodeInputs, append_tokens, gather_decode
from quickturn_kernels.ops.decode_stack import (
    DecoderStack,
    StackLayer,
    decode_stack,
    decode_stack_rows,
)
from quickturn_kernels.ops.embedding import embedding
from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import LinearWeight, linear, prepare_fp8_linear, prepare_linear
from quickturn_kernels.ops.linear_attention import (
    causal_conv1d,
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_step,
    gated_rms_norm,
)
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
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
    residual_moe_rows,
    route,
)
from quickturn_kernels.ops.norm import add_rms_norm, rms_norm
from quickturn_kernels.ops.norm_linear import (
    linear_add,
    linear_add_rows,
    norm_linear,
    norm_linear_rows,
    norm_linear_silu_and_mul,
)
from quickturn_kernels.ops.rotary import rotary_cache_write
from quickturn_kernels.ops.sampling import IN_PROMPT, Sampled, SamplingTensors, sample
from quickturn_kernels.platform import Platform, Requirement, current, describe
from quickturn_kernels.registry import (
    Implementation,
    Op,
    Priority,
    Signature,
    counted,
    define,
    implementations,
    load,
    ops,
    override,
    register,
    select,
    use,
)

__all__ = [
    "IN_PROMPT",
    "Boundaries",
    "DecodeInputs",
    "DecoderStack",
    "ExpertWeights",
    "Implementation",
    "LinearWeight",
    "Op",
    "PeerMemory",
    "Peers",
    "Platform",
    "Priority",
    "Requirement",
    "Router",
    "Routing",
    "Sampled",
    "SamplingTensors",
    "SharedExpert",
    "Signature",
    "StackLayer",
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "all_reduce_add_rms_norm",
    "append_tokens",
    "causal_conv1d",
    "counted",
    "current",
    "decode_stack",
    "decode_stack_rows",
    "define",
    "describe",
    "embedding",
    "gated_delta_decode",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_rms_norm",
    "gather_decode",
    "gelu_tanh_and_mul",
    "implementations",
    "linear",
    "linear_add",
    "linear_add_rows",
    "linear_silu_and_mul",
    "load",
    "merge_attention",
    "moe",
    "moe_block",
    "norm_linear",
    "norm_linear_rows",
    "norm_linear_silu_and_mul",
    "ops",
    "override",
    "paged_attention_decode",
    "paged_attention_prefill",
    "partial_attention_decode",
    "prepare_experts",
    "prepare_fp8_linear",
    "prepare_linear",
    "prepare_shared_expert",
    "register",
    "residual_moe_block",
    "residual_moe_rows",
    "rms_norm",
    "rotary_attention_decode",
    "rotary_cache_write",
    "route",
    "sample",
    "select",
    "sigmoid_gate",
    "silu_and_mul",
    "use",
]
