"""Log-probabilities of prompts: what the model thought of each token of a prompt before it was shown it.

The logits of a whole prompt would be as large as prompt x vocabulary. They are computed for a slice of the
step's tokens at a time, and of each slice a few numbers a token are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from quickturn_kernels import SamplingTensors, sample

from quickturn.execution.batch import StepRows
from quickturn.execution.upload import upload

SLICE_BYTES = 64 << 20
"""Of float32 logits at once."""

_NOT_ASKED = -1
_ABOVE_ALL = 1e9
"""A bias that makes its token the one that is chosen, whatever its logit."""


@dataclass(frozen=True)
class ScoredChunk:
    """What a step found out about the prompt tokens from position `start` on, of one slot.

    logprobs: float32 [N], their log-probabilities; ranks: int32 [N], how many tokens were at least as likely.
    top_tokens: int32 [N, n] and top_logprobs: float32 [N, n], the likeliest tokens of each place, best first.
    finite: whether all logits were numbers.
    """

    slot: int
    start: int
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_tokens: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    finite: bool


class PromptScorer:
    """Which slots want their prompt scored, and the scoring."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        """Tables on the host for `max_requests` slots."""
        self._device = device
        self.slice_rows = max(1, SLICE_BYTES // (4 * vocab_size))
        self._top = np.full(max_requests, _NOT_ASKED, dtype=np.int32)
        self._prompt = np.zeros(max_requests, dtype=np.int32)
        self._any = False

    def admit(self, slot: int, prompt_len: int, top: int | None) -> None:
        """Take a slot over for a request that wants `top` alternatives a prompt token, None for no scores."""
        self._top[slot] = _NOT_ASKED if top is None else top
        self._prompt[slot] = prompt_len
        self._any = top is not None or bool((self._top != _NOT_ASKED).any())

    def begin(self, rows: StepRows, token_ids: torch.Tensor) -> "Scoring | None":
        """The scoring of a step; None if nothing of it is scored. token_ids: int32 [slots, positions], all
        tokens of the prompts.
        """
        if not self._any:
            return None
        slots = rows.slots
        # The last token of a prompt says what the answer begins with: that is sampled, not scored.
        counts = np.minimum(rows.query_lens, self._prompt[slots] - 1 - rows.context_lens)
        chosen = np.flatnonzero((self._top[slots] != _NOT_ASKED) & (counts > 0))
        if not len(chosen):
            return None
        firsts = (np.cumsum(rows.query_lens) - rows.query_lens)[chosen]
        slots, counts, starts = slots[chosen], counts[chosen], rows.context_lens[chosen] + 1
        places = np.stack((_ranges(firsts, counts), np.repeat(slots, counts), _ranges(starts, counts)))
        at = upload(places.astype(np.int64), self._device)
        parts = [
            Part(*numbers)
            for numbers in zip(
                slots.tolist(), starts.tolist(), counts.tolist(), self._top[slots].tolist(), strict=True
            )
        ]
        return Scoring(parts, torch.split(at[0], self.slice_rows), token_ids[at[1], at[2]])


def slices_together(scored: Sequence[int], rows: int) -> tuple[tuple[int, ...], ...]:
    """Rows of every group of ranks in each slice of at most `rows`, where they score so many tokens. A group
    that has no more, or none, has one, of which nothing is read.
    """
    most = -(-max(scored) // rows)
    return tuple(tuple(max(1, min(rows, count - at * rows)) for count in scored) for at in range(most))


@dataclass(frozen=True)
class Part:
    """The tokens of one slot that a step scores, `count` from position `start` on, each with `top`
    alternatives.
    """

    slot: int
    start: int
    count: int
    top: int


class Scoring:
    """The scores of one step, slice by slice."""

    def __init__(self, parts: Sequence[Part], slices: Sequence[torch.Tensor], targets: torch.Tensor) -> None:
        """slices: int64 [n] each, the step's tokens whose logits say how likely the next one was. targets:
        int32 [N], those next ones.
        """
        self.parts = parts
        self.slices = slices
        self._targets = targets
        self._most = max(part.top for part in parts)
        self._done = 0
        self._integers: list[torch.Tensor] = []
        self._floats: list[torch.Tensor] = []

    def take(self, logits: torch.Tensor) -> None:
        """The next slice: float32 logits [n, V]. What is kept of it takes no room worth counting."""
        count = logits.shape[0]
        targets = self._targets[self._done : self._done + count]
        self._done += count
        found = sample(logits, _choose(targets), self._most)
        assert found.logprobs is not None
        own = logits.gather(1, targets[:, None].long())
        # A token that can't be is not chosen for all its bias; where a logit is no number nothing is.
        logprobs = torch.where(found.tokens == targets, found.logprobs, float("-inf"))
        ranks = (logits >= own).sum(-1)
        integers, floats = [(found.tokens < 0)[:, None], ranks[:, None]], [logprobs[:, None]]
        if found.top_tokens is not None and found.top_logprobs is not None:
            integers.append(found.top_tokens)
            floats.append(found.top_logprobs)
        self._integers.append(torch.cat([each.to(torch.int32) for each in integers], 1))
        self._floats.append(torch.cat(floats, 1))

    def fetch(self) -> Callable[[], Sequence[ScoredChunk]]:
        """Send everything to the host; what is returned may be called once it is there."""
        integers, floats = _to_host(torch.cat(self._integers)), _to_host(torch.cat(self._floats))
        return lambda: self._chunks(integers.numpy(), floats.numpy())

    def _chunks(self, integers: NDArray[np.int32], floats: NDArray[np.float32]) -> list[ScoredChunk]:
        chunks, at = [], 0
        for part in self.parts:
            ints, numbers = integers[at : at + part.count], floats[at : at + part.count]
            at += part.count
            chunks.append(
                ScoredChunk(
                    part.slot,
                    part.start,
                    logprobs=numbers[:, 0],
                    ranks=ints[:, 1],
                    top_tokens=ints[:, 2 : 2 + part.top],
                    top_logprobs=numbers[:, 1 : 1 + part.top],
                    finite=not ints[:, 0].any(),
                )
            )
        return chunks


def _ranges(starts: NDArray[np.integer], counts: NDArray[np.integer]) -> NDArray[np.integer]:
    """start, start + 1, ... of each, one behind the other."""
    return np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])


def _choose(targets: torch.Tensor) -> SamplingTensors:
    """Sampling that takes these tokens: int32 [n]."""
    count, device = targets.shape[0], targets.device
    floats = torch.empty(count, dtype=torch.float32, device=device)
    longs = torch.empty(count, dtype=torch.int64, device=device)
    # Greedy rows read neither.
    return SamplingTensors(
        floats,
        targets,
        floats,
        floats,
        longs,
        longs,
        bias_ids=targets[:, None],
        bias_values=torch.full((count, 1), _ABOVE_ALL, device=device),
        all_greedy=True,
        no_filters=True,
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
