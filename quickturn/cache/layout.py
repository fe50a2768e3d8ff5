"""Cache groups as models declare them, and how their blocks lie in the arena.

A block of a `full` or `window` group holds `block_tokens` tokens of every layer of the group: `[layers, 2
(k, v), block_tokens, kv_heads, head_dim]`. A slab is the physical unit of the arena, one size for all
groups; the blocks of a slab lie at one fixed stride that divides it, so that block ids index a flat strided
view of the whole arena and kernels see `[num_blocks, ...]`.
"""

import math
from dataclasses import dataclass
from typing import Literal

ALIGNMENT = 256
"""Bytes to which every block is aligned: enough for any vector load and for bulk copies."""

MAX_SLAB_BYTES = 64 << 20


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


@dataclass(frozen=True)
class GroupLayout:
    """Where the blocks of one group lie: `block_bytes` used of every `block_stride` bytes,
    `blocks_per_slab` a slab.
    """

    group: CacheGroup
    block_bytes: int
    block_stride: int
    blocks_per_slab: int


@dataclass(frozen=True)
class ArenaLayout:
    """The arena's plan: `num_slabs` slabs of `slab_bytes`, and each group's blocks in them."""

    slab_bytes: int
    num_slabs: int
    block_tokens: int
    itemsize: int
    groups: tuple[GroupLayout, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.slab_bytes * self.num_slabs

    def capacity_tokens(self) -> int:
        """Tokens that fit if all of them belong to one context: every group holds its share of the slabs."""
        slabs_per_block = sum(1 / group.blocks_per_slab for group in self.groups)
        return int(self.num_slabs / slabs_per_block) * self.block_tokens


def plan_arena(
    groups: tuple[CacheGroup, ...],
    *,
    block_tokens: int,
    itemsize: int,
    memory: int,
    slab_bytes: int | None = None,
) -> ArenaLayout:
    """Fit the groups' blocks into slabs with the least waste, and as many slabs as `memory` bytes hold.

    `itemsize` is the bytes of one cache element. `slab_bytes` fixes the slab instead of choosing it. Raises
    ValueError, with the numbers, when not even one block of each group fits.
    """
    if not groups:
        raise ValueError("a model must declare at least one cache group")
    sizes = [_align(group.elements_per_token() * block_tokens * itemsize, ALIGNMENT) for group in groups]
    slab = _choose_slab(sizes) if slab_bytes is None else slab_bytes
    if slab < max(sizes):
        raise ValueError(
            f"slab_bytes {slab} is smaller than a block of {max(sizes)} bytes; use at least that"
        )
    counts = [slab // size for size in sizes]
    slab = _align(slab, ALIGNMENT * math.lcm(*counts))
    num_slabs = memory // slab
    if num_slabs < len(groups):
        raise ValueError(
            f"a cache of {memory} bytes holds {num_slabs} slabs of {slab} bytes, but"
            f" {len(groups)} cache group(s) need at least one each;"
            f" raise --memory to {slab * len(groups)} or lower --block-tokens"
        )
    laid = tuple(
        GroupLayout(group, size, slab // count, count)
        for group, size, count in zip(groups, sizes, counts, strict=True)
    )
    return ArenaLayout(slab, num_slabs, block_tokens, itemsize, laid)


def _choose_slab(sizes: list[int]) -> int:
    """The slab, a multiple of the largest block, that wastes the smallest share over all groups; the
    smaller of equals.
    """
    largest = max(sizes)
    best, best_waste = largest, math.inf
    for count in range(1, max(1, MAX_SLAB_BYTES // largest) + 1):
        slab = largest * count
        waste = max((slab % size) / slab for size in sizes)
        if waste < best_waste:
            best, best_waste = slab, waste
        if waste == 0:
            break
    return best


def _align(size: int, unit: int) -> int:
    return -(-size // unit) * unit
