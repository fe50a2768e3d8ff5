"""How blocks of unlike size share slabs: little waste, no overlap, and a capacity that the control plane
agrees with.
"""

import random

import numpy as np
import pytest
import quickturn_control as control
import torch

from quickturn.cache.arena import Arena
from quickturn.cache.layout import AnyGroup, CacheDtypes, CacheGroup, StateGroup, plan_arena
from quickturn.cache.views import LayerState

BF16 = CacheDtypes(torch.bfloat16, torch.float32, torch.bfloat16)
FLOAT32 = CacheDtypes(torch.float32, torch.float32, torch.float32)
LARGE = (CacheGroup("full", tuple(range(10)), 2, 256), StateGroup(tuple(range(30)), 32, 128, 128, 8192, 4))
DENSE = (CacheGroup("full", tuple(range(8)), 4, 256), StateGroup(tuple(range(24)), 32, 128, 128, 8192, 4))
LOCAL = (CacheGroup("full", tuple(range(5)), 4, 256), CacheGroup("window", tuple(range(21)), 4, 256, 1024))
MIXED = (
    CacheGroup("full", (1,), 2, 16),
    CacheGroup("window", (0, 4), 1, 24, 9),
    StateGroup((2, 3), 4, 16, 8, 96, 4),
    StateGroup((5,), 2, 8, 8, 40, 3),
)


@pytest.mark.parametrize(("groups", "most"), [(LARGE, 0.003), (DENSE, 0.018), (LOCAL, 0.0), (MIXED, 0.05)])
def test_little_of_a_slab_is_wasted(groups: tuple[AnyGroup, ...], most: float) -> None:
    """A snapshot of 61 MiB beside blocks of 1.25 MiB, of 49 beside 2, and windows of the same size."""
    layout = plan_arena(groups, block_tokens=64, dtypes=BF16, memory=40 << 30)
    assert layout.waste() <= most
    assert layout.total_bytes > 0.99 * (40 << 30)
    for laid in layout.groups:
        assert laid.block_stride * laid.blocks_per_slab == layout.slab_bytes
        assert laid.block_stride >= laid.block_bytes


def test_blocks_of_tokens_are_no_larger_for_states_beside_them() -> None:
    layout = plan_arena(LARGE, block_tokens=64, dtypes=BF16, memory=40 << 30)
    assert layout.block_tokens == 64
    assert layout.groups[0].block_bytes == 10 * 2 * 64 * 2 * 256 * 2


def test_views_fill_the_arena_without_overlap() -> None:
    """Every block of every group, written with its own number in slabs dealt out at random, reads back."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    layout = plan_arena(MIXED, block_tokens=4, dtypes=FLOAT32, memory=1 << 20)
    arena = Arena(layout, torch.device("cpu"))
    caches = arena.layer_caches()
    assert [cache.group for cache in caches] == [1, 0, 0, 0, 1, 1]
    owner = [random.Random(seed + slab).randrange(len(MIXED)) for slab in range(layout.num_slabs)]
    expected = {}
    for slab, group in enumerate(owner):
        laid = layout.groups[group]
        for block in range(slab * laid.blocks_per_slab, (slab + 1) * laid.blocks_per_slab):
            for layer in laid.group.layers:
                cache = caches[layer]
                parts = (cache.recurrent, cache.conv) if isinstance(cache, LayerState) else (cache.k, cache.v)
                for part, tensor in enumerate(parts):
                    number = float(len(expected) + 1)
                    tensor[block] = number
                    expected[layer, part, block] = number
    for (layer, part, block), number in expected.items():
        cache = caches[layer]
        tensors = (cache.recurrent, cache.conv) if isinstance(cache, LayerState) else (cache.k, cache.v)
        assert (tensors[part][block] == number).all()


@pytest.mark.parametrize("groups", [MIXED, LOCAL, LARGE])
def test_capacity_is_what_the_control_plane_admits(groups: tuple[AnyGroup, ...]) -> None:
    small = groups is MIXED
    layout = plan_arena(
        groups, block_tokens=4 if small else 64, dtypes=BF16, memory=1 << 20 if small else 1 << 30
    )
    capacity = layout.capacity_tokens()
    scheduler = control.Scheduler(
        control.SchedulerConfig(
            groups=[
                control.GroupConfig(laid.group.kind, laid.blocks_per_slab, window=laid.group.window)
                for laid in layout.groups
            ],
            num_slabs=layout.num_slabs,
            block_tokens=layout.block_tokens,
        )
    )
    scheduler.add(control.Request(1, np.ones(capacity - 1, np.int32)))
    with pytest.raises(ValueError, match=r"needs .* blocks"):
        scheduler.add(control.Request(2, np.ones(capacity, np.int32)))


def test_too_little_memory_says_how_much() -> None:
    with pytest.raises(ValueError, match="raise --memory to"):
        plan_arena(LARGE, block_tokens=64, dtypes=BF16, memory=64 << 20)
    with pytest.raises(ValueError, match="smaller than a block"):
        plan_arena(LARGE, block_tokens=64, dtypes=BF16, memory=1 << 30, slab_bytes=1 << 20)
