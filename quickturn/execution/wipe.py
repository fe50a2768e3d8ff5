"""Blocks that hold what is not a number are wiped before somebody else gets them.

Attention gives the keys behind a context the weight zero, and zero times NaN is NaN: one request's bad
numbers, left in a freed block, would end the next owner's answer too. Only blocks that were reported are
looked for, so that a step without such an accident pays one comparison.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from quickturn.cache.arena import Arena


class Wiper:
    """Remembers spoilt bytes of the arena until their next owner comes."""

    def __init__(self, arena: Arena) -> None:
        """Nothing is spoilt yet."""
        self._arena = arena
        self._spans = np.empty((0, 2), dtype=np.int64)

    def spoil(self, group: int, blocks: Iterable[int]) -> None:
        """These blocks of a group hold bad numbers, and no request that comes later shares them."""
        added = self._bytes(group, np.array(list(blocks), dtype=np.int64))
        # A block of states is never wiped, because it is written before it is read: it may be named again.
        self._spans = np.unique(np.concatenate((self._spans, added)), axis=0)

    def wipe(self, group: int, blocks: NDArray[np.int32]) -> None:
        """Zero those of `blocks`, which requests are about to own, that overlap spoilt bytes."""
        if not len(self._spans) or not len(blocks):
            return
        owned = np.unique(blocks).astype(np.int64)
        spans = self._bytes(group, owned)
        begins, ends = spans[:, None, 0], spans[:, None, 1]
        hit = ((begins < self._spans[:, 1]) & (ends > self._spans[:, 0])).any(axis=1)
        if not hit.any():
            return
        ids = torch.from_numpy(owned[hit]).to(self._arena.device)
        self._arena.block_bytes(group).index_fill_(0, ids, 0)
        for begin, end in spans[hit].tolist():
            before = np.stack((self._spans[:, 0], np.minimum(self._spans[:, 1], begin)), axis=1)
            behind = np.stack((np.maximum(self._spans[:, 0], end), self._spans[:, 1]), axis=1)
            left = np.concatenate((before, behind))
            self._spans = left[left[:, 0] < left[:, 1]]

    def _bytes(self, group: int, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """First byte of each block and of what follows it: blocks of several groups may lie in one place, one
        after the other in time.
        """
        stride = self._arena.layout.groups[group].block_stride
        return np.stack((blocks * stride, (blocks + 1) * stride), axis=1)
