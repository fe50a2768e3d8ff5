"""All-reduce in CUDA C++ for Hopper, over memory that the ranks map into each other."""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quickturn_kernels import cuda_build
from quickturn_kernels.ops.all_reduce import PeerMemory, Peers, reference
from quickturn_kernels.platform import HOPPER, describe
from quickturn_kernels.registry import Priority, register

if cuda_build.available((9, 0)):

    @register(
        "all_gather",
        name="hopper",
        platform=HOPPER,
        traits={"memory": {True}},
        priority=Priority.SPECIALIZED,
    )
    def all_gather(x: Tensor, peers: Peers) -> Tensor:
        """See `quickturn_kernels.all_gather`."""
        memory = peers.memory
        assert memory is not None
        return launch_gather(memory, x) if memory.carries(x) else reference.all_gather(x, peers)

    @register(
        "all_reduce",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"memory": {True}},
        priority=Priority.SPECIALIZED,
    )
    def all_reduce(x: Tensor, peers: Peers) -> Tensor:
        """See `quickturn_kernels.all_reduce`."""
        memory = peers.memory
        assert memory is not None
        return launch(memory, x, None, None, 0.0) if memory.takes(x) else reference.all_reduce(x, peers)

    @register(
        "all_reduce_add_rms_norm",
        name="hopper",
        platform=HOPPER,
        dtypes=(torch.bfloat16,),
        traits={"memory": {True}},
        priority=Priority.SPECIALIZED,
    )
    def all_reduce_add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float, peers: Peers
    ) -> Tensor:
        """See `quickturn_kernels.all_reduce_add_rms_norm`."""
        memory = peers.memory
        assert memory is not None
        fits = weight.dtype in (x.dtype, torch.float32) and weight.is_contiguous()
        if fits and weight.data_ptr() % 16 == 0 and memory.takes(x) and memory.takes(residual):
            return launch(memory, x, residual, weight, eps)
        return reference.all_reduce_add_rms_norm(x, residual, weight, eps, peers)


def launch(
    memory: PeerMemory,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    two_shots: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum, or its norm with `residual` and `weight`; `two_shots` None leaves the choice to the size. It
    is written to `out` (contiguous) if that is given.
    """
    rows, width = x.shape
    if out is None:
        out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    code = _function(x.device)(
        memory.areas,
        memory.counters.data_ptr(),
        memory.capacity,
        memory.rank,
        memory.ranks,
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        None if weight is None else weight.data_ptr(),
        weight is not None and weight.dtype == torch.float32,
        out.data_ptr(),
        rows,
        width,
        eps,
        memory.two_shots(x) if two_shots is None else two_shots,
        int(memory.patience * 1e9),
        memory.missed.data_ptr(),
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"all-reduce of {tuple(x.shape)} over {memory.ranks} ranks: CUDA error {code}")
    return out


def launch_gather(memory: PeerMemory, x: Tensor, out: Tensor | None = None) -> Tensor:
    """What each rank has, written to `out` (contiguous) if that is given."""
    if out is None:
        out = torch.empty((memory.ranks, *x.shape), dtype=x.dtype, device=x.device)
    code = _gather(x.device)(
        memory.areas,
        memory.counters.data_ptr(),
        memory.capacity,
        memory.rank,
        memory.ranks,
        x.data_ptr(),
        out.data_ptr(),
        x.numel() * x.element_size(),
        int(memory.patience * 1e9),
        memory.missed.data_ptr(),
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    if code != 0:
        raise RuntimeError(f"all-gather of {tuple(x.shape)} over {memory.ranks} ranks: CUDA error {code}")
    return out


POINTER, WHOLE, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
AMONG: list[Any] = [POINTER, POINTER, LONG, WHOLE, WHOLE]
"""Areas, counters, capacity, rank, ranks."""
WAITING: list[Any] = [LONG, POINTER, POINTER]
"""Patience, whom it missed, stream."""


@cache
def _function(device: torch.device) -> "ctypes._FuncPointer":
    function = cuda_build.library(describe(device).capability).quickturn_all_reduce
    inputs: list[Any] = [POINTER, LONG, POINTER, LONG, POINTER, WHOLE]
    function.argtypes = [*AMONG, *inputs, POINTER, WHOLE, WHOLE, ctypes.c_float, WHOLE, *WAITING]
    function.restype = WHOLE
    return function


@cache
def _gather(device: torch.device) -> "ctypes._FuncPointer":
    function = cuda_build.library(describe(device).capability).quickturn_all_gather
    function.argtypes = [*AMONG, POINTER, POINTER, LONG, *WAITING]
    function.restype = WHOLE
    return function
