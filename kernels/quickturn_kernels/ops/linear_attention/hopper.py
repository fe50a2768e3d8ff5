"""Linear attention in CUDA C++ for Hopper."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.linear_attention import (
    hopper_conv,
    hopper_prefill,
    hopper_step,
    triton_conv,
    triton_prefill,
)
from quickturn_kernels.ops.linear_attention.boundaries import Boundaries
from quickturn_kernels.ops.linear_attention.reference import gated_delta_step as composed
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "causal_conv1d",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"width": {hopper_conv.WIDTH}},
        priority=Priority.SPECIALIZED,
    )
    def causal_conv1d(
        x: Tensor,
        weight: Tensor,
        states: Tensor,
        state_in: Tensor,
        state_out: Tensor,
        state_zero: Tensor,
        query_start: Tensor,
        max_query_len: int,
        bias: Tensor | None,
        boundaries: Boundaries | None,
    ) -> Tensor:
        """See `quickturn_kernels.causal_conv1d`. What the kernel can't do goes to the portable one."""
        ours = hopper_conv.takes(x, weight, states, state_in.shape[0])
        return (hopper_conv.launch if ours else triton_conv.launch)(
            x,
            weight,
            states,
            state_in,
            state_out,
            state_zero,
            query_start,
            max_query_len,
            bias,
            boundaries,
        )

    @register(
        "gated_delta_step",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"head_dim": {hopper_step.HEAD_DIM}, "channelwise": {False}},
        priority=Priority.SPECIALIZED,
    )
    def gated_delta_step(
        qkv: Tensor,
        conv_weight: Tensor,
        conv_states: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        state_in: Tensor,
        state_out: Tensor,
        state_zero: Tensor,
        key_heads: int,
        scale: float,
        conv_bias: Tensor | None,
        gate: Tensor | None,
        norm_weight: Tensor | None,
        eps: float,
        settled: bool,
    ) -> Tensor:
        """See `quickturn_kernels.gated_delta_step`. What the kernel can't do goes to the separate ops."""
        ours = hopper_step.takes(
            qkv, conv_weight, conv_states, a, b, a_log, dt_bias, states, key_heads, gate, norm_weight
        )
        return (hopper_step.launch if ours else composed)(
            qkv,
            conv_weight,
            conv_states,
            a,
            b,
            a_log,
            dt_bias,
            states,
            state_in,
            state_out,
            state_zero,
            key_heads,
            scale,
            conv_bias,
            gate,
            norm_weight,
            eps,
            settled,
        )

    @register(
        "gated_delta_prefill",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"head_dim": {hopper_prefill.HEAD_DIM}, "channelwise": {False}},
        priority=Priority.SPECIALIZED,
    )
    def gated_delta_prefill(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        states: Tensor,
        state_in: Tensor,
        state_out: Tensor,
        state_zero: Tensor,
        query_start: Tensor,
        context_lens: Tensor | None,
        max_query_len: int,
        scale: float,
        boundaries: Boundaries | None,
    ) -> Tensor:
        """See `quickturn_kernels.gated_delta_prefill`. What the kernel can't do goes to the portable ones."""
        ours = hopper_prefill.takes(q, k, v, a, b, a_log, dt_bias, states, state_in.shape[0])
        return (hopper_prefill.launch if ours else triton_prefill.launch)(
            q,
            k,
            v,
            a,
            b,
            a_log,
            dt_bias,
            states,
            state_in,
            state_out,
            state_zero,
            query_start,
            context_lens,
            max_query_len,
            scale,
            boundaries,
        )
