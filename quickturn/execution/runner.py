"""Carries out a step: uploads the deltas of a plan, runs the model, samples, and brings the tokens back.

`launch` never waits for the device; `PendingStep.wait` does. On a CPU the work is done when `launch` returns.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quickturn.cache.arena import Arena
from quickturn.cache.layout import ArenaLayout
from quickturn.execution.batch import DeviceBatch, GroupCounts, StepRows
from quickturn.execution.graphs import StepGraphs
from quickturn.execution.sampler import RowLogprobs, SampledRows, Sampler
from quickturn.execution.scoring import PromptScorer, ScoredChunk, Scoring, slices_together
from quickturn.execution.wipe import Wiper
from quickturn.layers.forward import ForwardBatch
from quickturn.models.base import Model
from quickturn.sampling_params import SamplingParams


@dataclass(frozen=True)
class BlockUpdate:
    """New block-table entries of one cache group: `table[slots[i], indexes[i]] = blocks[i]`; int32 arrays
    of one length.
    """

    slots: NDArray[np.int32]
    indexes: NDArray[np.int32]
    blocks: NDArray[np.int32]


@dataclass(frozen=True)
class StepTokens:
    """What a step produced. `tokens`: int32 [S], in row order of the rows that sampled. `seconds`: what the
    step added to the time of the steps before it. `scores`: of prompts, by slot.
    """

    tokens: NDArray[np.int32]
    logprobs: Sequence[RowLogprobs | None]
    seconds: float
    scores: Sequence[ScoredChunk] = ()


class PendingStep:
    """A launched step whose tokens may still be on their way to the host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        logprobs: Callable[[], Sequence[RowLogprobs | None]],
        started: float,
        done: torch.cuda.Event | None,
        scoring: Scoring | None = None,
        before: torch.cuda.Event | None = None,
        waited: float = 0.0,
    ) -> None:
        """`tokens` is on the host; with `done` it is valid once that event has happened. `before`: the event
        of the step before; `waited`: seconds since `started` that went into waiting for that step.
        """
        self.scored_slots = [] if scoring is None else [part.slot for part in scoring.parts]
        """Slots whose prompts the step scores, in the order of `StepTokens.scores`."""
        self._scores: Callable[[], Sequence[ScoredChunk]] = tuple if scoring is None else scoring.fetch()
        self._tokens = tokens
        self._logprobs = logprobs
        self._started = started
        self._done = done
        self._before = before
        self._launching = time.perf_counter() - started - waited

    def wait(self) -> StepTokens:
        """Block until the tokens are here."""
        seconds = self._launching
        if self._done is not None:
            self._done.synchronize()
            # By the device's clock: when the host looks, it may have spent long on launching the next step.
            # That time counts for the step that was launched.
            device = time.perf_counter() - self._started
            if self._before is not None:
                device = min(device, 1e-3 * self._before.elapsed_time(self._done))
            seconds = max(seconds, device)
        tokens = self._tokens.numpy().astype(np.int32)
        return StepTokens(tokens, self._logprobs(), seconds, self._scores())


class Runner:
    """The model, its arena and the device-resident batch of one rank."""

    def __init__(
        self,
        model: Model,
        layout: ArenaLayout,
        *,
        device: torch.device,
        max_requests: int,
        max_context: int,
        vocab_size: int,
        cache_scales: Mapping[int, tuple[float, float]] | None = None,
    ) -> None:
        """Allocate the arena and the tables of `max_requests` slots of `max_context` tokens."""
        self.arena = Arena(layout, device, cache_scales)
        self._model = model
        self._device = device
        self._batch = DeviceBatch(layout, self.arena.layer_caches(), max_requests, max_context, device)
        self._sampler = Sampler(max_requests, vocab_size, device)
        self._scorer = PromptScorer(max_requests, vocab_size, device)
        self._graphs: StepGraphs | None = None
        self._wiper = Wiper(self.arena)
        self._before: torch.cuda.Event | None = None
        self.steps: Counter[str] = Counter()
        """Steps by the path that they took: decode_graph, prompt_graph, mixed_graph, kernels, scored."""

    def rehearse_graphs(self, max_step_tokens: int, groups: int = 1) -> None:
        """Run steps as `capture_graphs` would record them."""
        StepGraphs(self._model, self._batch, self._device, max_step_tokens, groups).rehearse()

    def capture_graphs(
        self,
        max_step_tokens: int,
        progress: Callable[[int, int], None],
        groups: int = 1,
        agree: Callable[[int], int] = int,
    ) -> int:
        """Record the steps worth it, of at most `max_step_tokens` tokens; `progress(done, total)`. `groups`
        of ranks with requests of their own do so together; `agree`: the least of what all ranks say. Needs a
        CUDA device. Returns how many steps weren't recorded because they would have taken too long.
        """
        self._graphs = StepGraphs(self._model, self._batch, self._device, max_step_tokens, groups)
        return self._graphs.capture(progress, agree)

    def recorded_mixed(self) -> list[tuple[int, int]]:
        """Decode rows and tokens in all of the recorded steps that have a piece of a prompt beside them."""
        return [] if self._graphs is None else [(size.rows, size.tokens) for size in self._graphs.mixed]

    def admit(
        self, slot: int, tokens: NDArray[np.int32], prompt_len: int, sampling: SamplingParams, seed: int
    ) -> None:
        """Load a request into its slot: every known token, of which the first `prompt_len` are the
        prompt's.
        """
        self._batch.load_tokens(slot, tokens)
        self._sampler.admit(slot, tokens, prompt_len, sampling, seed)
        self._scorer.admit(slot, prompt_len, sampling.prompt_logprobs)

    def spoil(self, blocks: Sequence[Sequence[int]]) -> None:
        """These blocks of each group hold numbers that are none: wiped when somebody else gets them."""
        for group, ids in enumerate(blocks):
            self._wiper.spoil(group, ids)

    @torch.inference_mode()
    def launch(
        self,
        rows: StepRows,
        updates: Sequence[BlockUpdate],
        masks: Callable[[], torch.Tensor | None] | None = None,
        groups: GroupCounts | None = None,
    ) -> PendingStep:
        """Start one step. `updates` has one entry a cache group. `masks` is called when the logits are under
        way, and gives the tokens that each sampled row may take (int32 [S, ceil(V / 32)] on the host).
        `groups`: what runs elsewhere, where there are several groups of requests.
        """
        started = time.perf_counter()
        for group, update in enumerate(updates):
            self._wiper.wipe(group, update.blocks)
            self._batch.update_tables(group, update.slots, update.indexes, update.blocks)
        scoring = self._scorer.begin(rows, self._batch.token_ids)
        replayed = self._replay(rows, groups) if scoring is None else None
        self.steps[_path(rows, replayed is not None, scoring is not None)] += 1
        logits = replayed[0] if replayed is not None else self._forward(rows, groups, scoring)
        asked = time.perf_counter()
        mask = None if masks is None else masks()
        waited = time.perf_counter() - asked
        if replayed is not None and mask is None and self._sampler.is_plain(rows.slots[rows.samples != 0]):
            sampled = SampledRows(replayed[1], list)
        else:
            sampled = self._sample(logits, rows, mask)
        if self._device.type != "cuda":
            return PendingStep(sampled.tokens, sampled.logprobs, started, None, scoring)
        host = torch.empty(len(sampled.tokens), dtype=torch.int64, pin_memory=True)
        host.copy_(sampled.tokens, non_blocking=True)
        done = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        pending = PendingStep(host, sampled.logprobs, started, done, scoring, self._before, waited)
        done.record()
        self._before = done
        return pending

    def skip_prompts(self) -> None:
        """From now on prompts outside of CUDA graphs aren't computed: their logits are zeros, and the cache
        holds for them what it held before. For measuring decode steps behind contexts that take long to
        compute.
        """
        compute, vocab = self._model.forward, self._model.vocab_size

        def forward(batch: ForwardBatch) -> torch.Tensor:
            if batch.prefill is None:
                return compute(batch)
            rows = batch.token_ids.shape[0] if batch.sample_rows is None else batch.sample_rows.shape[0]
            return torch.zeros((rows, vocab), dtype=torch.float32, device=self._device)

        self._model.forward = forward  # type: ignore[method-assign]

    @torch.inference_mode()
    def help_out(self, groups: GroupCounts) -> None:
        """Take part in a step in which this rank's group has nothing to run, by rows of padding."""
        if self._replay(self._batch.no_rows(), groups) is None:
            self._forward_together(self._batch.padding_batch(), groups, None)

    def _replay(self, rows: StepRows, groups: GroupCounts | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._graphs is None or (groups is not None and not groups.decode_rows):
            return None
        return self._graphs.replay(rows, 0 if groups is None else groups.decode_rows)

    def _forward(self, rows: StepRows, groups: GroupCounts | None, scoring: Scoring | None) -> torch.Tensor:
        if groups is not None:
            # Every group has logits, so that all ranks go the same way through the model.
            return self._forward_together(self._batch.forward_batch(rows, samples=True), groups, scoring)
        batch = self._batch.forward_batch(rows)
        if scoring is None:
            return self._model.forward(batch)
        return self._model.forward_scored(batch, scoring.slices, scoring.take)

    def _forward_together(
        self, batch: ForwardBatch, groups: GroupCounts, scoring: Scoring | None
    ) -> torch.Tensor:
        batch = replace(batch, dp_tokens=groups.tokens, dp_samples=groups.samples)
        if not any(groups.scored):
            return self._model.forward(batch)
        together = slices_together(groups.scored, self._scorer.slice_rows)
        own = [] if scoring is None else list(scoring.slices)
        # Where others have more slices than this rank, it helps with any row, and forgets what comes.
        helping = torch.zeros(1, dtype=torch.int64, device=self._device)
        slices = own + [helping] * (len(together) - len(own))
        taken = itertools.count()

        def take(logits: torch.Tensor) -> None:
            if scoring is not None and next(taken) < len(own):
                scoring.take(logits)

        return self._model.forward_scored(replace(batch, dp_slices=together), slices, take)

    def _sample(self, logits: torch.Tensor, rows: StepRows, mask: torch.Tensor | None) -> SampledRows:
        """Choose the tokens of the rows that sample, and append them."""
        sampling = rows.samples != 0
        slots = rows.slots[sampling]
        positions = (rows.context_lens + rows.query_lens)[sampling]
        bitmask = None if mask is None else mask.to(self._device, non_blocking=True)
        sampled = self._sampler.sample(logits, slots, positions, bitmask)
        if len(slots):
            self._batch.append(slots, positions - 1, sampled.tokens)
        return sampled


def _path(rows: StepRows, replayed: bool, scored: bool) -> str:
    if replayed and rows.decodes_only():
        return "decode_graph"
    if replayed:
        return "mixed_graph" if rows.num_decode else "prompt_graph"
    return "scored" if scored else "kernels"
