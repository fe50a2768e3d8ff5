"""What a layer sees of the arena."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerCache:
    """An attention layer's view of the arena.

    `group`: index of its cache group. `k`, `v`: `[num_blocks, block_tokens, kv_heads, head_dim]`, strided (a
    block holds all layers of its group). `k_scale`, `v_scale`: what they were divided by, if they are e4m3.
    """

    group: int
    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class LayerState:
    """A recurrent layer's view of the arena, by state block.

    `group`: index among the state groups. `recurrent`: `[num_blocks, heads, key_dim, value_dim]`. `conv`:
    `[num_blocks, channels, width - 1]`, the inputs of the last `width - 1` tokens, the oldest first. Both
    strided between blocks (a block holds all layers of its group).
    """

    group: int
    recurrent: torch.Tensor
    conv: torch.Tensor


AnyCache = LayerCache | LayerState
