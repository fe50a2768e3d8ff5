"""The step between the projections as the ops that it's made of, each in the tier that suits."""

from torch import Tensor

from quickturn_kernels.ops.activation import sigmoid_gate
from quickturn_kernels.ops.attention import paged_attention_decode
from quickturn_kernels.ops.rotary import rotary_cache_write
from quickturn_kernels.registry import Priority, register


@register("rotary_attention_decode", name="reference", priority=Priority.REFERENCE)
def rotary_attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    window: int,
    max_context_len: int,
    settled: bool,
    k_scale: float,
    v_scale: float,
    gate: Tensor | None,
) -> Tensor:
    """See `quickturn_kernels.rotary_attention_decode`."""
    rotary_cache_write(
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    out = paged_attention_decode(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        max_context_len=max_context_len,
    )
    if gate is None:
        return out
    return sigmoid_gate(out.view(gate.shape), gate).view(out.shape)
