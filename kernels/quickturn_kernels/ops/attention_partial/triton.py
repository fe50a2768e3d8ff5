"""Partial attention in Triton: the decode kernel, which keeps what its softmax adds up to; and merging."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.ops.attention import FP8, SAME
from quickturn_kernels.ops.attention.triton_decode import HEAD_DIMS, launch
from quickturn_kernels.platform import TRITON, TRITON_FP8
from quickturn_kernels.registry import Priority, register
from quickturn_kernels.triton_common import FLOATS, next_power_of_two


@register(
    "partial_attention_decode",
    name="triton_fp8",
    platform=TRITON_FP8,
    dtypes=FLOATS,
    traits={"head_dim": HEAD_DIMS, "cache": {FP8}},
    priority=Priority.PORTABLE,
)
@register(
    "partial_attention_decode",
    name="triton",
    platform=TRITON,
    dtypes=FLOATS,
    traits={"head_dim": HEAD_DIMS, "cache": {SAME}},
    priority=Priority.PORTABLE,
)
def partial_attention_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    softcap: float,
    max_context_len: int,
) -> Tensor:
    """See `quickturn_kernels.partial_attention_decode`."""
    rows, heads, dim = q.shape
    out = torch.empty((rows, heads, dim + 1), dtype=torch.float32, device=q.device)
    launch(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale,
        0,
        None,
        softcap,
        max_context_len,
        out,
        partial=True,
    )
    return out


@triton.jit
def merge_kernel(
    parts,
    sinks,
    out,
    heads,
    count,
    part_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One program for one head of one row: its parts one after the other."""
    line = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, HEAD_PAD)
    inside = dim < HEAD_DIM
    here = parts + line * (HEAD_DIM + 1)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    if SINKS:
        top = tl.load(sinks + line % heads).to(tl.float32)
        total += 1.0
    merged = tl.zeros([HEAD_PAD], tl.float32)
    for part in range(count):
        at = here + part * part_stride
        log = tl.load(at + HEAD_DIM)
        # Nothing weighs a part without keys, not even against nothing.
        new_top = tl.maximum(top, log)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp(top - base)
        weight = tl.exp(log - base)
        merged = merged * shrink + tl.load(at + dim, mask=inside, other=0.0) * weight
        total = total * shrink + weight
        top = new_top
    result = merged / tl.where(total > 0.0, total, 1.0)
    tl.store(out + line * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=inside)


@register("merge_attention", name="triton", platform=TRITON, dtypes=FLOATS, priority=Priority.PORTABLE)
def merge_attention(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See `quickturn_kernels.merge_attention`."""
    count, rows, heads, width = parts.shape
    out = torch.empty((rows, heads, width - 1), dtype=dtype, device=parts.device)
    if rows > 0:
        merge_kernel[(rows * heads,)](
            parts,
            sinks,
            out,
            heads,
            count,
            rows * heads * width,
            HEAD_DIM=width - 1,
            HEAD_PAD=next_power_of_two(width - 1),
            SINKS=sinks is not None,
            num_warps=1,
        )
    return out
