"""Cache groups as models declare them, and how their blocks lie in the arena.

A block of a `full` or `window` group holds `block_tokens` tokens of every layer of the group:
`[layers, 2 (k, v), block_tokens, kv_heads, head_dim]`. A slab is the unit of the arena; the blocks of a slab lie at one fixed
stride, so that block ids index a flat strided view of the whole arena and kernels see `[num_blocks, ...]`.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CacheGroup:
    """The layers whose cache has one shape and one lifetime.

    `layers` are decoder layer indexes in order. `window` is the number of tokens seen back, 0 for `full`.
    """

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int = 0

    def elements_per_token(self) -> int:
        """Cache elements of one token over the group's layers."""
        return len(self.layers) * 2 * self.kv_heads * self.head_dim
