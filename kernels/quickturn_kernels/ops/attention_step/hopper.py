"""Head norms, rotary, cache write and decode attention in one kernel: keys are fetched before q is there."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.attention.hopper_launch import DTYPES, HEAD_DIMS, launch, takes, turns
from quickturn_kernels.ops.attention_step.reference import rotary_attention_decode as composed
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "rotary_attention_decode",
        name="hopper",
        platform=HOPPER,
        dtypes=DTYPES,
        traits={"head_dim": HEAD_DIMS},
        priority=Priority.SPECIALIZED,
    )
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
        weights = [weight for weight in (q_weight, k_weight) if weight is not None]
        if (
            not takes(q, k_cache, v_cache)
            or not turns(cos_sin.shape[1], q.shape[2])
            or len(weights) == 1
            or any(weight.dtype not in (q.dtype, torch.float32) for weight in weights)
            or len({weight.dtype for weight in weights}) > 1
            or (gate is not None and gate.stride(1) != 1)
        ):
            return composed(
                q,
                k,
                v,
                positions,
                cos_sin,
                k_cache,
                v_cache,
                slot_mapping,
                block_tables,
                context_lens,
                scale,
                q_weight,
                k_weight,
                eps,
                window,
                max_context_len,
                settled,
                k_scale,
                v_scale,
                gate,
            )
        out = launch(
            q,
            k_cache,
            v_cache,
            block_tables,
            context_lens,
            scale * k_scale,
            window,
            max_context_len,
            fresh=(k, v, cos_sin, q_weight, k_weight),
            eps=eps,
            scales=(k_scale, v_scale),
            gate=gate,
            early=settled,
        )
        return out if v_scale == 1.0 else out.mul_(v_scale)
