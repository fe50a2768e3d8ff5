"""Decoder layers as the ops that they are made of, each in the tier that suits."""

import torch
from torch import Tensor

from quickturn_kernels.ops.attention_step import rotary_attention_decode
from quickturn_kernels.ops.decode_stack import Caches, DecoderStack
from quickturn_kernels.ops.gated_linear import linear_silu_and_mul
from quickturn_kernels.ops.linear import linear
from quickturn_kernels.ops.norm import add_rms_norm, rms_norm
from quickturn_kernels.registry import Priority, register


@register("decode_stack", name="reference", priority=Priority.REFERENCE)
def decode_stack(
    stack: DecoderStack,
    x: Tensor,
    caches: Caches,
    positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.decode_stack`."""
    rows, residual = x.shape[0], x
    heads = (stack.heads, stack.kv_heads, stack.kv_heads)
    for index, (layer, (k_cache, v_cache)) in enumerate(zip(stack.layers, caches, strict=True)):
        if index == 0:
            x = rms_norm(x, layer.attn_norm, stack.eps)
        else:
            x = add_rms_norm(x, residual, layer.attn_norm, stack.eps)
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(rows, sum(heads), stack.head_dim)
        q, k, v = qkv.split_with_sizes(heads, 1)
        attended = rotary_attention_decode(
            q,
            k,
            v,
            positions,
            stack.cos_sin,
            k_cache,
            v_cache,
            slot_mapping,
            block_tables,
            context_lens,
            stack.scale,
            q_weight=layer.q_norm,
            k_weight=layer.k_norm,
            eps=stack.eps,
            window=stack.window,
            max_context_len=max_context_len,
            settled=True,
        )
        x = linear(attended.view(rows, -1), layer.o, layer.o_bias)
        x = add_rms_norm(x, residual, layer.mlp_norm, stack.eps)
        x = linear(linear_silu_and_mul(x, layer.gate_up, layer.gate_up_bias), layer.down, layer.down_bias)
    return linear(add_rms_norm(x, residual, stack.norm, stack.eps), stack.head, None, torch.float32)


@register("decode_stack_rows", name="reference", priority=Priority.PORTABLE)
def decode_stack_rows(stack: DecoderStack) -> int:
    """Never faster: it's the same ops."""
    return 0
