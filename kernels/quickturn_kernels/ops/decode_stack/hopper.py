"""The decoder stack of few rows on Hopper: one kernel that stays for the whole step."""

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.decode_stack import Caches, DecoderStack
from quickturn_kernels.ops.decode_stack.hopper_launch import TRUSTED_ROWS, launch, most_rows, takes_caches
from quickturn_kernels.ops.decode_stack.reference import decode_stack as composed
from quickturn_kernels.platform import HOPPER
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "decode_stack",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        priority=Priority.SPECIALIZED,
    )
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
        if not 0 < x.shape[0] <= most_rows(stack) or not takes_caches(stack, caches):
            return composed(
                stack, x, caches, positions, slot_mapping, block_tables, context_lens, max_context_len
            )
        return launch(stack, x, caches, block_tables, context_lens)

    @register(
        "decode_stack_rows",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        priority=Priority.REFERENCE,  # taken only when named, until its fault is found
    )
    def decode_stack_rows(stack: DecoderStack) -> int:
        """See `quickturn_kernels.decode_stack_rows`."""
        return min(most_rows(stack), TRUSTED_ROWS)
