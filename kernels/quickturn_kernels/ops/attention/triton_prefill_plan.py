"""How a prefill call is cut into programs: tables by shape and capability, in place of tuning at run time."""

from dataclasses import dataclass

MAX_SPLITS = 16
MIN_SPLIT_KEYS = 512

LARGE_SHARED_MEMORY = 200 << 10
"""Data-centre GPUs since Hopper; others have 99 or 163 KiB."""


@dataclass(frozen=True)
class Tiles:
    """How one call is cut."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def pointer_tiles(head_dim: int, itemsize: int, score_rows: int, shared_memory: int) -> Tiles:
    """Tiles for at most `score_rows` rows of scores (query tokens times group)."""
    block_m = 16 if score_rows <= 16 else 64 if score_rows <= 64 else 128
    if itemsize == 4:
        return Tiles(min(block_m, 32), max(16, min(32, 4096 // head_dim)), 4, 1)
    if block_m < 128:
        return Tiles(block_m, 64 if head_dim <= 128 else 32, 4, 2)
    if shared_memory >= LARGE_SHARED_MEMORY:
        return Tiles(128, 128 if head_dim <= 128 else 64, 8, 2)
    return Tiles(128, 64, 8, 2) if head_dim <= 128 else Tiles(128, 32, 8, 1)


def splits_for(programs: int, window: int, max_context_len: int, multiprocessors: int) -> int:
    """In how many parts to cut the keys so that all multiprocessors have work; each part must be worth its
    own sum.
    """
    longest = min(max_context_len, window) if window > 0 else max_context_len
    wanted = (2 * multiprocessors) // max(1, programs)
    return max(1, min(MAX_SPLITS, wanted, longest // MIN_SPLIT_KEYS))
