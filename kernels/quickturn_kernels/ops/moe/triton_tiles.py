"""Which rows the experts multiply: the (token, choice) pairs sorted by expert, in tiles of one expert each.

A pair's number is token * top_k + choice. Both kernels run one program an expert, which looks through all
pairs and writes what is its own: no atomics, no order that depends on timing, nothing that the host must
know but upper bounds.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quickturn_kernels.triton_common import next_power_of_two

MAX_CHUNK = 4096


@dataclass(frozen=True)
class Tiles:
    """experts, rows: int32 [most], the expert of each tile, and how many pairs it has. pairs: int32
    [most, size], pair numbers, -1 where a tile has no more. used: int32 [1], how many tiles there are.
    """

    experts: Tensor
    rows: Tensor
    pairs: Tensor
    used: Tensor

    @property
    def most(self) -> int:
        """Tiles that there may be at most."""
        return self.pairs.shape[0]


@triton.jit
def count_kernel(chosen, counts, pairs, CHUNK: tl.constexpr):
    """counts[expert]: pairs that chose this program's expert."""
    expert = tl.program_id(0)
    count = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        count += tl.sum((tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32), axis=0)
    tl.store(counts + expert, count)


@triton.jit
def place_kernel(
    chosen,
    counts,
    tile_experts,
    tile_rows,
    tile_pairs,
    used,
    pairs,
    experts,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The tiles of this program's expert, behind those of the experts before it."""
    expert = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    tiles = (tl.load(counts + index, mask=index < experts, other=0) + ROWS - 1) // ROWS
    first = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    if expert == experts - 1:
        tl.store(used, first + own)
    count = tl.load(counts + expert)
    for tile in range(0, own):
        tl.store(tile_experts + first + tile, expert)
        tl.store(tile_rows + first + tile, tl.minimum(count - tile * ROWS, ROWS))
    found = first * ROWS
    if own > 0:
        row = (first + own - 1) * ROWS + tl.arange(0, ROWS)
        real = row < found + count
        tl.store(tile_pairs + row, tl.full([ROWS], -1, tl.int32), mask=real == 0)
        for start in range(0, pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            mine = (tl.load(chosen + pair, mask=pair < pairs, other=-1) == expert).to(tl.int32)
            tl.store(tile_pairs + found + tl.cumsum(mine, axis=0) - 1, pair, mask=mine > 0)
            found += tl.sum(mine, axis=0)


def empty_tiles(pairs: int, experts: int, size: int, device: torch.device) -> Tiles:
    """Room for the tiles of `size` rows that so many pairs may need at most."""
    active = min(experts, pairs)
    most = (pairs - active) // size + active
    return Tiles(
        torch.empty(most, dtype=torch.int32, device=device),
        torch.empty(most, dtype=torch.int32, device=device),
        torch.empty((most, size), dtype=torch.int32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )


def make_tiles(chosen: Tensor, experts: int, size: int) -> Tiles:
    """Sort the pairs of `chosen` (int32 [T, k], contiguous, T > 0) into tiles of `size` rows."""
    device, pairs = chosen.device, chosen.numel()
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    tiles = empty_tiles(pairs, experts, size, device)
    chunk = min(MAX_CHUNK, next_power_of_two(pairs))
    count_kernel[(experts,)](chosen, counts, pairs, CHUNK=chunk, num_warps=4)
    place_kernel[(experts,)](
        chosen,
        counts,
        tiles.experts,
        tiles.rows,
        tiles.pairs,
        tiles.used,
        pairs,
        experts,
        ROWS=size,
        CHUNK=chunk,
        BLOCK=next_power_of_two(experts),
        num_warps=4,
    )
    return tiles
