"""Memory of GPUs of one host that their processes map into each other (CUDA IPC)."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.platform import describe

MAX_RANKS = 8
MAX_WIDTH = 16384
HANDLE_BYTES = 64
CAPACITY = 8 << 20
"""Bytes of the largest message. Larger ones are bound by bandwidth, which NCCL knows how to use."""

ONE_SHOT_BYTES = {2: CAPACITY, 4: 512 << 10, 8: 256 << 10}
"""Largest message that every rank adds up whole, by the most ranks that it is for: two ranks read the same
number of bytes either way, more read less in two shots, which cost a second meeting."""

Exchange = Callable[[bytes], Sequence[bytes]]
"""What each rank of the group gives, in their order; every rank calls it."""


def has_kernel(device: torch.device) -> bool:
    """Whether this GPU has the kernel; it must be the same on all ranks."""
    return cuda_build.available(describe(device).capability)


class PeerMemory:
    """One rank's area, and those of the others as it sees them. Free only after all ranks are done."""

    def __init__(self, rank: int, ranks: int, device: torch.device, exchange: Exchange) -> None:
        """Every rank of the group makes one at once. Raises RuntimeError, on all ranks, if any of them can't;
        ValueError for more ranks than the kernel knows.
        """
        if not 2 <= ranks <= MAX_RANKS:
            raise ValueError(f"memory is shared by 2 to {MAX_RANKS} ranks, not {ranks}")
        self.rank, self.ranks, self.capacity = rank, ranks, CAPACITY
        self._library = cuda_build.library(describe(device).capability)
        self._mapped: list[ctypes.c_void_p] = []
        self._own = ctypes.c_void_p()
        area, counters = ctypes.c_longlong(), ctypes.c_longlong()
        self._library.quickturn_peer_bytes(
            ctypes.c_longlong(CAPACITY), ctypes.byref(area), ctypes.byref(counters)
        )
        self.counters = torch.zeros(counters.value, dtype=torch.uint8, device=device)
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        with torch.cuda.device(device):
            code = self._library.quickturn_peer_make(area, ctypes.byref(self._own), handle)
            handles = exchange(b"" if code else handle.raw)
            pointers = (ctypes.c_void_p * ranks)()
            for other, given in enumerate(handles):
                if other == rank or not given or code:
                    continue
                there = ctypes.c_void_p()
                code = code or self._library.quickturn_peer_open(given, ctypes.byref(there))
                if not code:
                    self._mapped.append(there)
                    pointers[other] = there.value
        pointers[rank] = self._own.value
        self.areas = pointers
        # Nobody may begin before all have mapped all; and if one can't, none does.
        failed = [other for other, said in enumerate(exchange(b"" if code else b"mapped")) if not said]
        if failed:
            self.close()
            raise RuntimeError(f"ranks {failed} of {ranks} can't map the others' memory (CUDA error {code})")

    def takes(self, x: Tensor) -> bool:
        """Whether the kernel can sum such an x."""
        return (
            x.dtype == torch.bfloat16
            and x.ndim == 2
            and x.shape[0] > 0
            and x.shape[1] % 8 == 0
            and x.shape[1] <= MAX_WIDTH
            and x.numel() * x.element_size() <= CAPACITY
            and x.stride(1) == 1
            and x.stride(0) % 8 == 0
            and x.data_ptr() % 16 == 0
        )

    def two_shots(self, x: Tensor) -> bool:
        """Whether the ranks share out the sum of such an x."""
        most = next(size for ranks, size in ONE_SHOT_BYTES.items() if self.ranks <= ranks)
        return x.numel() * x.element_size() > most

    def close(self) -> None:
        """Unmaps the others' memory and frees the own. No rank may use it any more."""
        for area in self._mapped:
            self._library.quickturn_peer_close(area, 1)
        self._mapped = []
        if self._own:
            self._library.quickturn_peer_close(self._own, 0)
            self._own = ctypes.c_void_p()
