"""Paged prefill attention of half precision on Hopper: warpgroup products over keys that the copy engine
brings.
"""

from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.attention import SAME, triton_prefill
from quickturn_kernels.ops.attention.hopper_prefill_launch import DTYPES, HEAD_DIMS, launch, takes
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "paged_attention_prefill",
        name="hopper",
        platform=HOPPER,
        dtypes=DTYPES,
        traits={"head_dim": HEAD_DIMS, "softcap": {False}, "cache": {SAME}},
        priority=Priority.SPECIALIZED,
    )
    def paged_attention_prefill(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        max_query_len: int,
        scale: float,
        window: int,
        sinks: Tensor | None,
        softcap: float,
        max_context_len: int,
    ) -> Tensor:
        """See `quickturn_kernels.paged_attention_prefill`. What the copy engine can't address goes to
        Triton.
        """
        arguments = (q, k_cache, v_cache, block_tables, query_start, context_lens)
        if not takes(q, k_cache, v_cache, block_tables, scale):
            return triton_prefill.paged_attention_prefill(
                *arguments, max_query_len, scale, window, sinks, softcap, max_context_len
            )
        return launch(*arguments, scale, window, sinks, max_context_len)
