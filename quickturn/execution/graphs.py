"""Decode steps as CUDA graphs, one for each bucket of batch sizes.

A graph reads one small static buffer (slots, positions, and which states are read and written) and gathers
everything else on the device. It
also takes the likeliest tokens and appends them, so that a greedy step costs one copy and one launch; other
rows are sampled from its logits, and their tokens written over those. Rows that fill a batch up to its bucket
point to the padding slot: nothing is written for them, and what they compute is thrown away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quickturn.execution.batch import DeviceBatch, StepRows, decode_arrays
from quickturn.execution.sampler import greedy
from quickturn.execution.upload import Bundle, host_tensor, upload
from quickturn.models.base import Model

WARM_UP_RUNS = 2
"""Eager runs ahead of a recording: kernels get compiled and libraries allocate their workspaces."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded decode step. inputs: uint8, what `decode_arrays` lists, bundled; logits: float32 [bucket,
    vocab]; tokens: int64 [bucket], the likeliest.
    """

    graph: torch.cuda.CUDAGraph
    bundle: Bundle
    inputs: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor


def buckets(max_requests: int) -> list[int]:
    """Batch sizes worth a graph: fine where a padded row costs most, coarser above."""
    sizes = {
        1,
        2,
        3,
        4,
        6,
        8,
        *range(12, 33, 4),
        *range(40, 129, 8),
        *range(144, 257, 16),
        *range(288, 2049, 32),
    }
    return sorted({size for size in sizes if size < max_requests} | {max_requests})


class DecodeGraphs:
    """The recorded decode steps of one runner."""

    def __init__(self, model: Model, batch: DeviceBatch, device: torch.device) -> None:
        """Nothing is recorded until `capture`."""
        self._model = model
        self._batch = batch
        self._device = device
        self._recorded: dict[int, RecordedStep] = {}
        self._bucket_of: list[int] = []

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None]) -> None:
        """Record every bucket, the largest first so that the others share its memory."""
        sizes = buckets(self._batch.max_requests)
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(sizes)):
            progress(done, len(sizes))
            self._recorded[size] = self._record(size, pool)
        progress(len(sizes), len(sizes))
        self._bucket_of = [
            next(size for size in sizes if size >= count) for count in range(1, self._batch.max_requests + 1)
        ]

    def replay(self, rows: StepRows) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits (float32 [R, vocab]) and greedy tokens (int64 [R], appended already) of a step of sampled
        decode rows; None if the step isn't of that kind.

        Both are overwritten by the next replay of the same bucket.
        """
        count = len(rows.slots)
        if not rows.decodes_only():
            return None
        size = self._bucket_of[count - 1]
        recorded = self._recorded[size]
        packed = recorded.bundle.pack(decode_arrays(rows, size, self._batch.padding_slot))
        recorded.inputs.copy_(host_tensor(packed, self._device), non_blocking=True)
        recorded.graph.replay()
        return recorded.logits[:count], recorded.tokens[:count]

    def _record(self, size: int, pool: Any) -> RecordedStep:
        arrays = decode_arrays(self._batch.no_rows(), size, self._batch.padding_slot)
        bundle = Bundle.of(arrays)
        inputs = upload(bundle.pack(arrays), self._device)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_RUNS):
                self._forward(bundle.unpack(inputs))
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits, tokens = self._forward(bundle.unpack(inputs))
        return RecordedStep(graph, bundle, inputs, logits, tokens)

    def _forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._model.forward(self._batch.decode_batch(inputs, self._batch.max_context))
        tokens = greedy(logits)
        self._batch.append_decoded(inputs[0], inputs[1], tokens)
        return logits, tokens
