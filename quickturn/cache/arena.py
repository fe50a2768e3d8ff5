"""The bytes of the cache: one allocation, seen by every layer through strided views."""

import torch

from quickturn.cache.layout import ArenaLayout, GroupLayout
from quickturn.cache.views import LayerCache


class Arena:
    """One allocation on the device, laid out as an `ArenaLayout` says.

    The memory starts as zeros: attention masks keys that were never written by giving them weight zero, and
    zero times an unwritten NaN would still be NaN. On a CPU the pages are only committed when they are
    first written.
    """

    def __init__(self, layout: ArenaLayout, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate `layout.total_bytes` bytes. Raises MemoryError that says what to lower."""
        if dtype.itemsize != layout.itemsize:
            raise ValueError(
                f"layout is for elements of {layout.itemsize} bytes, but {dtype} has {dtype.itemsize}"
            )
        self.layout = layout
        self.dtype = dtype
        try:
            self._bytes = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise MemoryError(
                f"no room for a cache of {layout.total_bytes / 2**30:.2f} GiB on {device}; lower --memory"
            ) from error

    def layer_caches(self) -> tuple[LayerCache, ...]:
        """The view of every decoder layer, in layer order."""
        views: dict[int, LayerCache] = {}
        for index, laid in enumerate(self.layout.groups):
            for place, layer in enumerate(laid.group.layers):
                views[layer] = LayerCache(index, self._view(laid, place, 0), self._view(laid, place, 1))
        return tuple(views[layer] for layer in sorted(views))

    def _view(self, laid: GroupLayout, place: int, part: int) -> torch.Tensor:
        """Keys (part 0) or values (part 1) of the group's `place`-th layer: [num_blocks, block_tokens,
        kv_heads, head_dim].
        """
        group, tokens = laid.group, self.layout.block_tokens
        heads, dim = group.kv_heads, group.head_dim
        shape = (self.layout.num_slabs * laid.blocks_per_slab, tokens, heads, dim)
        stride = (laid.block_stride // self.dtype.itemsize, heads * dim, dim, 1)
        offset = (place * 2 + part) * tokens * heads * dim
        return self._bytes.view(self.dtype).as_strided(shape, stride, offset)
