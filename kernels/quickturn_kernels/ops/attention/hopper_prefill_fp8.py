"""Prefill attention over a cache in e4m3 on Hopper: its pages are widened once, and then read by the kernel
for 16-bit caches. Each is read by so many tiles of queries that this costs little.
"""

from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.attention import FP8, triton_prefill
from quickturn_kernels.ops.attention.hopper_prefill_launch import DTYPES, HEAD_DIMS, launch, takes
from quickturn_kernels.ops.attention.triton_widen import widen
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

LEAST_QUERIES = 256
"""Queries of a kv head, a row on average, from which on widening is worth it: a key is converted in the time
that the portable kernel loses on so many.
"""

MOST_BYTES = 1 << 30
"""Of the widened pages."""

if cuda_build.available((9, 0)):

    @register(
        "paged_attention_prefill",
        name="hopper_fp8",
        platform=HOPPER,
        dtypes=DTYPES,
        traits={"head_dim": HEAD_DIMS, "softcap": {False}, "cache": {FP8}},
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
        """See `quickturn_kernels.paged_attention_prefill`. Few queries over long contexts go to Triton."""
        _, block_tokens, kv_heads, head_dim = k_cache.shape
        rows = context_lens.shape[0]
        width = -(-max_context_len // block_tokens)
        size = rows * width * block_tokens * kv_heads * head_dim * 2 * q.element_size()
        if q.shape[0] * (q.shape[1] // kv_heads) >= LEAST_QUERIES * rows and size <= MOST_BYTES:
            lens = context_lens.contiguous()
            keys, values, tables = widen(k_cache, v_cache, block_tables, lens, width, q.dtype)
            if takes(q, keys, values, tables, scale):
                return launch(
                    q, keys, values, tables, query_start, lens, scale, window, sinks, max_context_len
                )
        return triton_prefill.paged_attention_prefill(
            q,
            k_cache,
            v_cache,
            block_tables,
            query_start,
            context_lens,
            max_query_len,
            scale,
            window,
            sinks,
            softcap,
            max_context_len,
        )
