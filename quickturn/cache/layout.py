"""Cache groups as models declare them, and how their blocks lie in the arena.

A block of a `full` or `window` group holds `block_tokens` tokens (or this rank's part of them) of every layer
of the group: `[layers, 2 (k, v), block_tokens, kv_heads, head_dim]`. A block of a `state` group is one
snapshot of all its layers: of each the recurrent state `[heads, key_dim, value_dim]` and the convolution's
`[channels, width - 1]`. A slab is the physical unit of the arena, one size for all groups; the blocks of a
slab lie at one fixed stride that divides it, so that block ids index a flat strided view of the whole arena
and kernels see `[num_blocks, ...]`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

ALIGNMENT = 256
"""Bytes to which every block is aligned: enough for any vector load and for bulk copies."""

MAX_SLAB_BYTES = 64 << 20
LEAST_SLABS = 64
"""A slab is no larger than this share of the memory, if a block of each group allows it."""

MAX_CANDIDATES = 2048
CLOSE_ENOUGH = 0.005
"""Of slabs whose waste differs by less, the smallest is taken."""


@dataclass(frozen=True)
class CacheDtypes:
    """Element types in the arena: keys and values, recurrent states, convolution states."""

    kv: torch.dtype
    state: torch.dtype
    conv: torch.dtype


@dataclass(frozen=True)
class CacheGroup:
    """Attention layers whose cache has one shape and one lifetime.

    `layers` are decoder layer indexes in order. `window` is the number of tokens seen back, 0 for `full`.
    `parts`: ranks that share out the tokens of every block; each holds an equal part of them.
    """

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int = 0
    parts: int = 1

    def elements_per_token(self) -> int:
        """Cache elements of one token over the group's layers, on all ranks that share out tokens."""
        return len(self.layers) * 2 * self.kv_heads * self.head_dim

    def block_bytes(self, block_tokens: int, dtypes: CacheDtypes) -> int:
        """Bytes of a block, before alignment."""
        return self.elements_per_token() * self.tokens_here(block_tokens) * dtypes.kv.itemsize

    def tokens_here(self, block_tokens: int) -> int:
        """Tokens of a block that are on this rank. Raises ValueError if its ranks can't share them out."""
        if block_tokens % self.parts:
            raise ValueError(
                f"blocks of {block_tokens} tokens can't be shared out to {self.parts} ranks;"
                f" take a divisor of {block_tokens} for --cp"
            )
        return block_tokens // self.parts


@dataclass(frozen=True)
class StateGroup:
    """Recurrent layers whose states have one shape: `[heads, key_dim, value_dim]` and `[channels, width -
    1]`. `layers` are decoder layer indexes in order.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    width: int
    kind: Literal["state"] = "state"
    window: int = 0

    def recurrent_bytes(self, dtypes: CacheDtypes) -> int:
        """Bytes of one layer's recurrent state, aligned."""
        return _align(self.heads * self.key_dim * self.value_dim * dtypes.state.itemsize, ALIGNMENT)

    def conv_bytes(self, dtypes: CacheDtypes) -> int:
        """Bytes of one layer's convolution state, aligned."""
        return _align(self.channels * (self.width - 1) * dtypes.conv.itemsize, ALIGNMENT)

    def block_bytes(self, block_tokens: int, dtypes: CacheDtypes) -> int:
        """Bytes of a snapshot, whatever the tokens of a block."""
        return len(self.layers) * (self.recurrent_bytes(dtypes) + self.conv_bytes(dtypes))


AnyGroup = CacheGroup | StateGroup


@dataclass(frozen=True)
class GroupLayout:
    """Where the blocks of one group lie: `block_bytes` used of every `block_stride` bytes,
    `blocks_per_slab` a slab.
    """

    group: AnyGroup
    block_bytes: int
    block_stride: int
    blocks_per_slab: int


@dataclass(frozen=True)
class ArenaLayout:
    """The arena's plan: `num_slabs` slabs of `slab_bytes`, and each group's blocks in them."""

    slab_bytes: int
    num_slabs: int
    block_tokens: int
    dtypes: CacheDtypes
    groups: tuple[GroupLayout, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.slab_bytes * self.num_slabs

    def waste(self) -> float:
        """The largest share of a slab that a group leaves unused."""
        return max(1 - laid.blocks_per_slab * laid.block_bytes / self.slab_bytes for laid in self.groups)

    def capacity_tokens(self) -> int:
        """Tokens that fit if all of them belong to one context, which is what the control plane would admit:
        blocks for every token in full groups, for the window in window groups, and one state.
        """
        most = max((laid.blocks_per_slab * self.num_slabs for laid in self.groups), default=0)
        fitting, too_many = 0, most + 1
        while too_many - fitting > 1:
            blocks = (fitting + too_many) // 2
            if self._slabs_of(blocks) <= self.num_slabs:
                fitting = blocks
            else:
                too_many = blocks
        return fitting * self.block_tokens

    def bytes_read(self, rows: int, context: int) -> int:
        """Cache bytes that a decode step of `rows` contexts of `context` tokens reads, and writes of
        states.
        """
        total = 0
        for laid in self.groups:
            if isinstance(laid.group, StateGroup):
                total += 2 * rows * laid.block_bytes
            else:
                seen = min(context, laid.group.window or context)
                each = laid.group.elements_per_token() * self.dtypes.kv.itemsize
                total += rows * seen * each // laid.group.parts
        return total

    def _slabs_of(self, blocks: int) -> int:
        slabs = 0
        for laid in self.groups:
            need = blocks
            if laid.group.kind == "state":
                need = 1
            elif laid.group.window:
                need = min(blocks, -(-laid.group.window // self.block_tokens) + 2)
                # A window that moves on has its blocks begin anywhere in a slab.
                need += laid.blocks_per_slab - 1 if need < blocks else 0
            slabs += -(-need // laid.blocks_per_slab)
        return slabs


def plan_arena(
    groups: tuple[AnyGroup, ...],
    *,
    block_tokens: int,
    dtypes: CacheDtypes,
    memory: int,
    slab_bytes: int | None = None,
) -> ArenaLayout:
    """Fit the groups' blocks into slabs with the least waste, and as many slabs as `memory` bytes hold.

    `slab_bytes` fixes the slab instead of choosing it. Raises ValueError, with the numbers, when not even
    one block of each group fits.
    """
    if not groups:
        raise ValueError("a model must declare at least one cache group")
    sizes = [_align(group.block_bytes(block_tokens, dtypes), ALIGNMENT) for group in groups]
    slab = _choose_slab(sizes, memory) if slab_bytes is None else slab_bytes
    if slab < max(sizes):
        raise ValueError(
            f"slab_bytes {slab} is smaller than a block of {max(sizes)} bytes; use at least that"
        )
    slab, counts = _whole_strides(slab, sizes)
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
    return ArenaLayout(slab, num_slabs, block_tokens, dtypes, laid)


def _choose_slab(sizes: list[int], memory: int) -> int:
    """The slab that wastes the smallest share over all groups; the smallest of those that are about as good.

    Candidates are multiples of every group's block: where a state is tens of megabytes, whole blocks of the
    other groups may fit a somewhat larger slab better.
    """
    largest = max(sizes)
    bound = max(largest, min(max(MAX_SLAB_BYTES, largest * 9 // 8), memory // LEAST_SLABS))
    found: dict[int, float] = {}
    for size in set(sizes):
        first = -(-largest // size)
        for count in range(first, min(bound // size, first + MAX_CANDIDATES) + 1):
            slab, counts = _whole_strides(size * count, sizes)
            found[slab] = max(1 - n * each / slab for n, each in zip(counts, sizes, strict=True))
    if not found:
        return largest
    enough = min(found.values()) + CLOSE_ENOUGH
    return min(slab for slab, waste in found.items() if waste <= enough)


def _whole_strides(slab: int, sizes: list[int]) -> tuple[int, list[int]]:
    """The next slab that each group's number of blocks divides into aligned strides, and those numbers."""
    counts = [slab // size for size in sizes]
    return _align(slab, ALIGNMENT * math.lcm(*counts)), counts


def _align(size: int, unit: int) -> int:
    return -(-size // unit) * unit
