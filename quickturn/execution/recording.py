"""Recording a step as a CUDA graph that reads one small static buffer."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quickturn.execution.upload import Bundle, host_tensor, upload

WARM_UP_RUNS = 2
"""Eager runs ahead of a recording: kernels get compiled and libraries allocate their workspaces."""

Forward = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""From a step's arrays on the device to logits, float32 [R, vocab], and the likeliest tokens, int64 [R]."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. inputs: uint8, the step's arrays, bundled; logits: float32 [R, vocab]; tokens: int64
    [R], the likeliest.
    """

    graph: torch.cuda.CUDAGraph
    bundle: Bundle
    inputs: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor

    def replay(self, arrays: Sequence[NDArray[np.integer]]) -> None:
        """Run the step on `arrays`, in stream order; `logits` and `tokens` are overwritten."""
        packed = self.bundle.pack(arrays)
        self.inputs.copy_(host_tensor(packed, self.inputs.device), non_blocking=True)
        self.graph.replay()


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile, and none is left over in cycles: an engine that is gone may still
    have its graphs, and the destruction of a graph breaks off a recording.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def record(
    forward: Forward, arrays: Sequence[NDArray[np.integer]], device: torch.device, pool: Any
) -> RecordedStep:
    """Record `forward` over arrays of the shapes of `arrays`, whose values must be harmless to run on; `pool`
    is the memory that recorded steps share.
    """
    bundle = Bundle.of(arrays)
    inputs = upload(bundle.pack(arrays), device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_RUNS):
            forward(bundle.unpack(inputs))
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits, tokens = forward(bundle.unpack(inputs))
    return RecordedStep(graph, bundle, inputs, logits, tokens)
