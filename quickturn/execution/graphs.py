"""Steps as CUDA graphs: decode steps by their number of rows, the end of one prompt by its number of tokens,
decode rows beside a piece of one prompt by both.

A graph reads one small static buffer (slots, positions, and which states are read and written) and gathers
everything else on the device. It also takes the likeliest tokens and appends them, so that a greedy step
costs one copy and one launch; other rows are sampled from its logits, and their tokens written over those.

What fills a step up to its bucket is padding: rows of the padding slot, or tokens behind the prompt's end.
Nothing is written for it, and what it computes is thrown away.

The second kind is what agents wait for: a few hundred new tokens behind a long context that is cached. Run
kernel by kernel, such a step spends more time on the host than on the device. The third keeps those who are
being answered from waiting for the host whenever somebody brings a prompt.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from quickturn.execution.batch import DeviceBatch, StepRows, decode_arrays, mixed_arrays, prompt_arrays
from quickturn.execution.mixed import MixedSize, mixed_size_for, mixed_sizes
from quickturn.execution.recording import RecordedStep, nothing_collected, record
from quickturn.execution.sampler import greedy
from quickturn.execution.upload import upload_together
from quickturn.models.base import Model

PROMPT_TOKENS = (64, 128, 192, 256, 384, 512)
"""Numbers of new tokens for which the end of a prompt is recorded."""

MIXED_SECONDS = 8.0
"""After so long no further step of decode rows beside a prompt is recorded: an engine shall start soon."""


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


class StepGraphs:
    """The recorded steps of one runner."""

    def __init__(
        self, model: Model, batch: DeviceBatch, device: torch.device, max_step_tokens: int, groups: int = 1
    ) -> None:
        """Nothing is recorded until `capture`. `groups`: of ranks, with requests of their own: they replay
        decode steps of one size together, and nothing else.
        """
        self._groups = groups
        self._model = model
        self._batch = batch
        self._device = device
        self._decode: dict[int, RecordedStep] = {}
        self._bucket_of: list[int] = []
        self._prompts: dict[int, RecordedStep] = {}
        self._prompt_sizes = [size for size in PROMPT_TOKENS if size <= max_step_tokens and groups == 1]
        self._mixed: dict[MixedSize, RecordedStep] = {}
        self._mixed_sizes: list[MixedSize] = []
        if groups == 1 and not _shared_contexts(model):
            self._mixed_sizes = mixed_sizes(batch.max_requests, max_step_tokens)
        # One for all of them: logits are many bytes.
        rows = 1 + max((size.rows for size in self._mixed_sizes), default=-1)
        self._mixed_logits = torch.empty((rows, model.vocab_size), dtype=torch.float32, device=device)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run the smallest and the largest step of each kind on padding, as they would be recorded."""
        batch, none = self._batch, self._batch.no_rows()
        for rows in sorted({1, batch.max_requests}):
            self._decode_step(upload_together(decode_arrays(none, rows, batch.padding_slot), self._device))
        for tokens in sorted({*self._prompt_sizes[:1], *self._prompt_sizes[-1:]}):
            self._end_prompt(tokens, upload_together(prompt_arrays(none, batch.padding_slot), self._device))
        for size in sorted({min(self._mixed_sizes), max(self._mixed_sizes)} if self._mixed_sizes else ()):
            arrays = mixed_arrays(none, size.rows, batch.padding_slot)
            self._mixed_step(size, upload_together(arrays, self._device))

    @nothing_collected()
    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None], agree: Callable[[int], int]) -> int:
        """Record every bucket, the largest first so that the others share its memory; then as many mixed
        steps as there is time for, those that save most first. Returns how many there was none for.
        """
        batch, none = self._batch, self._batch.no_rows()
        sizes = buckets(batch.max_requests)
        pool = torch.cuda.graph_pool_handle()
        done, total = 0, len(sizes) + len(self._prompt_sizes) + len(self._mixed_sizes)
        for size in reversed(self._prompt_sizes):
            progress(done, total)
            arrays = prompt_arrays(none, batch.padding_slot)
            self._prompts[size] = record(partial(self._end_prompt, size), arrays, self._device, pool)
            done += 1
        for size in reversed(sizes):
            progress(done, total)
            arrays = decode_arrays(none, size, batch.padding_slot)
            self._decode[size] = record(self._decode_step, arrays, self._device, pool)
            done += 1
        self._bucket_of = [
            next(size for size in sizes if size >= count) for count in range(1, batch.max_requests + 1)
        ]
        began = time.monotonic()
        for mixed in self._mixed_sizes:
            progress(done, total)
            # All ranks go on, or none: what they record are exchanges, too.
            if not agree(int(time.monotonic() - began < MIXED_SECONDS)):
                break
            arrays = mixed_arrays(none, mixed.rows, batch.padding_slot)
            self._mixed[mixed] = record(partial(self._mixed_step, mixed), arrays, self._device, pool)
            done += 1
        progress(total, total)
        return total - done

    @property
    def mixed(self) -> Collection[MixedSize]:
        """The recorded steps of decode rows beside a piece of a prompt."""
        return self._mixed

    def replay(self, rows: StepRows, least: int = 0) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Logits (float32 [R, vocab]) and greedy tokens (int64 [R], appended already) of a step of sampled
        decode rows, filled up to at least `least`, of the end of one short prompt, or of decode rows beside a
        short piece of one prompt (of its rows that are sampled); None if the step is of no such kind.

        Both are overwritten by the next replay of the same bucket, logits of mixed steps by that of any.
        """
        count = len(rows.slots)
        if rows.decodes_only():
            size = self._bucket_of[max(count, least) - 1]
            recorded = self._decode[size]
            recorded.replay(decode_arrays(rows, size, self._batch.padding_slot))
        elif count == 1 and rows.samples[0] and rows.query_lens[0] <= max(self._prompt_sizes, default=0):
            size = next(size for size in self._prompt_sizes if size >= rows.query_lens[0])
            recorded = self._prompts[size]
            recorded.replay(prompt_arrays(rows, self._batch.padding_slot))
        elif 0 < rows.num_decode == count - 1:
            mixed = mixed_size_for(self._mixed, rows.num_decode, int(rows.query_lens[-1]))
            if mixed is None:
                return None
            recorded = self._mixed[mixed]
            recorded.replay(mixed_arrays(rows, mixed.rows, self._batch.padding_slot))
            count = int(np.count_nonzero(rows.samples))
        else:
            return None
        return recorded.logits[:count], recorded.tokens[:count]

    def _decode_step(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self._batch.decode_batch(inputs, self._batch.max_context)
        if self._groups > 1:
            counts = (len(inputs[0]),) * self._groups
            batch = replace(batch, dp_tokens=counts, dp_samples=counts)
        logits = self._model.forward(batch)
        tokens = greedy(logits)
        self._batch.append_decoded(inputs[0], inputs[1], tokens)
        return logits, tokens

    def _end_prompt(self, size: int, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._model.forward(self._batch.prompt_batch(inputs, size))
        tokens = greedy(logits)
        slots, starts, counts = inputs[:3]
        self._batch.append_decoded(slots, starts + counts - 1, tokens)
        return logits, tokens

    def _mixed_step(
        self, size: MixedSize, inputs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._mixed_logits[: size.rows + 1]
        logits.copy_(self._model.forward(self._batch.mixed_batch(inputs, size.prompt)))
        tokens = greedy(logits)
        sampled_slots, sampled_positions = inputs[4:6]
        self._batch.append_decoded(sampled_slots, sampled_positions, tokens)
        return logits, tokens


def _shared_contexts(model: Model) -> bool:
    """Whether ranks share out the tokens of a cache: then a recorded prompt brings together as many keys as a
    context may have.
    """
    return any(group.kind != "state" and group.parts > 1 for group in model.cache_groups())
