"""Memory of GPUs of one host that the ranks of a group write to and read: mapped by their processes into each
other (CUDA IPC), or of several ranks that one process has on one GPU.
"""

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

GATHER_BYTES = 1 << 20
"""Of one rank's part of what the kernel gathers."""

PATIENCE_S = 300.0
"""How long a kernel waits for another rank's."""

Exchange = Callable[[bytes], Sequence[bytes]]
"""What each rank of the group gives, in their order; every rank calls it."""


def has_kernel(device: torch.device) -> bool:
    """Whether this GPU has the kernel; it must be the same on all ranks."""
    return cuda_build.available(describe(device).capability)


class PeerMemory:
    """The ranks' areas as one of them sees them, and how often it met the others. Free only after all ranks
    are done.
    """

    def __init__(
        self,
        rank: int,
        areas: Sequence[int],
        device: torch.device,
        patience: float = PATIENCE_S,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`areas`: addresses, in the order of the ranks; `close` lets go of them."""
        self.rank, self.ranks, self.capacity = rank, len(areas), CAPACITY
        self.areas = (ctypes.c_void_p * len(areas))(*areas)
        self.patience = patience
        _, size = _sizes(device)
        self.counters = torch.zeros(size, dtype=torch.uint8, device=device)
        # On the host, where it can be read when the GPU's context is lost.
        self.missed = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._close = close

    def missing(self) -> int | None:
        """The rank (of the group) for which a kernel waited longer than `patience` seconds before it gave up,
        which is an error of the CUDA context and the end of all that it runs; None if none did.
        """
        return int(self.missed) - 1 if self.missed > 0 else None

    def abandon(self) -> None:
        """Another rank is known to be gone: kernels that wait for it give up. Any thread may call this."""
        if not self.missed:
            self.missed.fill_(-1)

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

    def carries(self, x: Tensor) -> bool:
        """Whether the kernel can gather such an x."""
        return 0 < x.numel() * x.element_size() <= GATHER_BYTES and x.is_contiguous()

    def two_shots(self, x: Tensor) -> bool:
        """Whether the ranks share out the sum of such an x."""
        most = next(size for ranks, size in ONE_SHOT_BYTES.items() if self.ranks <= ranks)
        return x.numel() * x.element_size() > most

    def close(self) -> None:
        """Lets go of the areas. No rank may use this one's any more."""
        close, self._close = self._close, lambda: None
        close()


def mapped(
    rank: int, ranks: int, device: torch.device, exchange: Exchange, patience: float = PATIENCE_S
) -> PeerMemory:
    """An area on this rank's GPU, and those of the other processes of this host. Every rank of the group
    makes one at once; several may be on one GPU. A kernel that waits longer than `patience` seconds ends with
    an error.

    Raises RuntimeError, on all ranks, if any of them can't; ValueError for more ranks than the kernel knows.
    """
    if not 2 <= ranks <= MAX_RANKS:
        raise ValueError(f"memory is shared by 2 to {MAX_RANKS} ranks, not {ranks}")
    own, opened = ctypes.c_void_p(), list[ctypes.c_void_p]()

    code: int | str

    def close() -> None:
        for area in opened:
            library.quickturn_peer_close(area, 1)
        if own:
            library.quickturn_peer_close(own, 0)

    handle = ctypes.create_string_buffer(HANDLE_BYTES)
    areas = [0] * ranks
    library = cuda_build.library(describe(device).capability)
    with torch.cuda.device(device):
        try:
            size = ctypes.c_longlong(_sizes(device)[0])
            code = library.quickturn_peer_make(size, ctypes.byref(own), handle)
        except (cuda_build.CompileError, OSError) as error:
            code = str(error)
        for other, given in enumerate(exchange(b"" if code else handle.raw)):
            if other == rank or not given or code:
                continue
            there = ctypes.c_void_p()
            code = library.quickturn_peer_open(given, ctypes.byref(there))
            if not code:
                opened.append(there)
                areas[other] = there.value or 0
    areas[rank] = own.value or 0
    # Nobody may begin before all have mapped all; and if one can't, none does.
    failed = [other for other, said in enumerate(exchange(b"" if code else b"mapped")) if not said]
    if failed:
        close()
        raise RuntimeError(f"ranks {failed} of {ranks} can't map the others' memory (error {code})")
    return PeerMemory(rank, areas, device, patience, close)


def side_by_side(ranks: int, device: torch.device, patience: float = PATIENCE_S) -> list[PeerMemory]:
    """Of each of several ranks that are streams of this process on one GPU: to try and to time the kernels
    where there is no second one. All of their blocks must fit on the GPU at once. Closing one frees the areas
    of all.
    """
    size, _ = _sizes(device)
    areas = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(ranks)]
    torch.cuda.synchronize(device)
    pointers = [area.data_ptr() for area in areas]
    return [PeerMemory(rank, pointers, device, patience, areas.clear) for rank in range(ranks)]


def _sizes(device: torch.device) -> tuple[int, int]:
    """Bytes of an area and of its rank's counters."""
    area, counters = ctypes.c_longlong(), ctypes.c_longlong()
    library = cuda_build.library(describe(device).capability)
    library.quickturn_peer_bytes(ctypes.c_longlong(CAPACITY), ctypes.byref(area), ctypes.byref(counters))
    return area.value, counters.value
