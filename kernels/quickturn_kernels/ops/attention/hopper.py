"""Paged decode attention of 16-bit rows on Hopper: the copy engine keeps a ring of keys full."""

from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.attention import hopper_prefill, hopper_prefill_fp8, triton_decode
from quickturn_kernels.ops.attention.hopper_launch import DTYPES, HEAD_DIMS, launch, takes
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

__all__ = ["hopper_prefill", "hopper_prefill_fp8"]

if cuda_build.available((9, 0)):

    @register(
        "paged_attention_decode",
        name="hopper",
        platform=HOPPER,
        dtypes=DTYPES,
        traits={"head_dim": HEAD_DIMS, "sinks": {False}, "softcap": {False}},
        priority=Priority.SPECIALIZED,
    )
    def paged_attention_decode(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
        sinks: Tensor | None,
        softcap: float,
        max_context_len: int,
    ) -> Tensor:
        """See `quickturn_kernels.paged_attention_decode`."""
        arguments = (q, k_cache, v_cache, block_tables, context_lens, scale, window)
        if not takes(q, k_cache, v_cache):
            return triton_decode.paged_attention_decode(*arguments, sinks, softcap, max_context_len)
        return launch(*arguments, max_context_len)
