"""What a layer sees of the arena."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerCache:
    """One layer's view of the arena.

    `k`, `v`: `[num_blocks, block_tokens, kv_heads, head_dim]`, strided (a block holds all layers of its
    group).
    """

    group: int
    k: torch.Tensor
    v: torch.Tensor
