"""The bytes of the cache: one allocation, seen by every layer through strided views."""

from collections.abc import Mapping

import torch

from quickturn.cache.layout import ArenaLayout, CacheGroup, GroupLayout, StateGroup
from quickturn.cache.views import AnyCache, LayerCache, LayerState


class Arena:
    """One allocation on the device, laid out as an `ArenaLayout` says.

    The memory starts as zeros: attention masks keys that were never written by giving them weight zero, and
    zero times an unwritten NaN would still be NaN. On a CPU the pages are only committed when they are
    first written.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        device: torch.device,
        scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """Allocate `layout.total_bytes` bytes. `scales`: of keys and values in e4m3, by decoder layer, 1 for
        others. Raises MemoryError that says what to lower.
        """
        self.layout = layout
        self._scales = {} if scales is None or layout.dtypes.kv != torch.float8_e4m3fn else scales
        try:
            self._bytes = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise MemoryError(
                f"no room for a cache of {layout.total_bytes / 2**30:.2f} GiB on {device}; lower --memory"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self._bytes.device

    def block_bytes(self, group: int) -> torch.Tensor:
        """The bytes of a group's blocks, all layers: uint8 [num_blocks, bytes of a block]."""
        laid = self.layout.groups[group]
        blocks = self.layout.num_slabs * laid.blocks_per_slab
        return self._bytes.as_strided((blocks, laid.block_stride), (laid.block_stride, 1))

    def layer_caches(self) -> tuple[AnyCache, ...]:
        """The view of every decoder layer, in layer order."""
        views: dict[int, AnyCache] = {}
        states = 0
        for index, laid in enumerate(self.layout.groups):
            for place, layer in enumerate(laid.group.layers):
                if isinstance(laid.group, StateGroup):
                    views[layer] = self._state(laid, laid.group, place, states)
                else:
                    views[layer] = self._keys_and_values(laid, laid.group, place, index, layer)
            states += laid.group.kind == "state"
        return tuple(views[layer] for layer in sorted(views))

    def _keys_and_values(
        self, laid: GroupLayout, group: CacheGroup, place: int, index: int, layer: int
    ) -> LayerCache:
        dtype, tokens = self.layout.dtypes.kv, group.tokens_here(self.layout.block_tokens)
        row = group.kv_heads * group.head_dim
        shape = (tokens, group.kv_heads, group.head_dim)
        part = tokens * row * dtype.itemsize
        k, v = (self._view(laid, dtype, (place * 2 + half) * part, shape) for half in (0, 1))
        return LayerCache(index, k, v, *self._scales.get(layer, (1.0, 1.0)))

    def _state(self, laid: GroupLayout, group: StateGroup, place: int, index: int) -> LayerState:
        dtypes = self.layout.dtypes
        recurrent, conv = group.recurrent_bytes(dtypes), group.conv_bytes(dtypes)
        start = place * (recurrent + conv)
        shape = (group.heads, group.key_dim, group.value_dim)
        return LayerState(
            index,
            self._view(laid, dtypes.state, start, shape),
            self._view(laid, dtypes.conv, start + recurrent, (group.channels, group.width - 1)),
        )

    def _view(
        self, laid: GroupLayout, dtype: torch.dtype, offset: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Contiguous tensors of `shape`, one a block, `offset` bytes into it: [num_blocks, *shape]."""
        stride = [1]
        for size in reversed(shape[1:]):
            stride.insert(0, stride[0] * size)
        blocks = self.layout.num_slabs * laid.blocks_per_slab
        return self._bytes.view(dtype).as_strided(
            (blocks, *shape), (laid.block_stride // dtype.itemsize, *stride), offset // dtype.itemsize
        )
