"""Sampling state of every slot on the device, and the choice of the next tokens.

The host keeps a small mirror of what each slot asks for, so that a step of greedy rows pays for nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from quickturn_kernels import IN_PROMPT, Sampled, SamplingTensors, sample

from quickturn.execution.upload import upload
from quickturn.sampling_params import SamplingParams

_NO_LOGPROBS = -1
_BANNED = -1e9
"""A bias under which no token is taken while there are others."""


@dataclass(frozen=True)
class RowLogprobs:
    """One sampled token: its log-probability and the likeliest alternatives as (token id, log-probability),
    best first.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class SampledRows:
    """Chosen tokens, int64 [S] on the device, -1 where a row's logits were not finite; logprobs are fetched
    when asked for.
    """

    tokens: torch.Tensor
    logprobs: Callable[[], Sequence[RowLogprobs | None]]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row of `logits` [R, V]: int64 [R], -1 where logits are not finite."""
    rows = logits.shape[0]
    floats = torch.empty(rows, dtype=torch.float32, device=logits.device)
    longs = torch.empty(rows, dtype=torch.int64, device=logits.device)
    ints = torch.empty(rows, dtype=torch.int32, device=logits.device)
    # Greedy rows read none of these.
    params = SamplingTensors(floats, ints, floats, floats, longs, longs, all_greedy=True, no_filters=True)
    return sample(logits, params).tokens


class Sampler:
    """Slot-indexed sampling parameters, penalty counts and biases."""

    def __init__(self, max_requests: int, vocab_size: int, device: torch.device) -> None:
        """Tables for `max_requests` slots and one padding row; counts and biases are allocated when first
        used.
        """
        self._device = device
        self._vocab_size = vocab_size
        rows = max_requests + 1
        # Columns: temperature, top_p, min_p, presence, frequency, repetition.
        self._floats = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 1.0], device=device).repeat(rows, 1)
        # Columns: top_k, seed.
        self._ints = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self._counts: torch.Tensor | None = None
        self._bias_ids = torch.empty((rows, 0), dtype=torch.int32, device=device)
        self._bias_values = torch.empty((rows, 0), dtype=torch.float32, device=device)
        self._draws = np.zeros(rows, dtype=np.bool_)
        self._filters = np.zeros(rows, dtype=np.bool_)
        self._penalties = np.zeros(rows, dtype=np.bool_)
        self._biased = np.zeros(rows, dtype=np.bool_)
        self._logprobs = np.full(rows, _NO_LOGPROBS, dtype=np.int32)
        self._unending: dict[int, tuple[int, dict[int, float]]] = {}
        """Of slots whose answer may not end yet: the first position that may, and the bias from there on."""

    def admit(
        self, slot: int, tokens: NDArray[np.int32], prompt_len: int, sampling: SamplingParams, seed: int
    ) -> None:
        """Take a slot over for a request whose known tokens are `tokens`, the first `prompt_len` of them
        its prompt. Its `stop_token_ids` are not drawn among its first `min_tokens`.
        """
        p = sampling
        if p.temperature > 0 or self._draws[slot]:
            self._floats[slot, :3] = self._upload([p.temperature, p.top_p, p.min_p], np.float32)
            self._ints[slot] = self._upload([p.top_k, seed], np.int64)
        self._draws[slot] = p.temperature > 0
        self._filters[slot] = p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)
        self._logprobs[slot] = _NO_LOGPROBS if p.logprobs is None else p.logprobs
        self._admit_penalties(slot, tokens, prompt_len, p)
        bias = p.logit_bias
        self._unending.pop(slot, None)
        if p.min_tokens and p.stop_token_ids and len(tokens) < prompt_len + p.min_tokens:
            self._unending[slot] = prompt_len + p.min_tokens, bias
            bias = bias | dict.fromkeys(p.stop_token_ids, _BANNED)
        self._admit_bias(slot, bias)

    def is_plain(self, slots: NDArray[np.int32]) -> bool:
        """Whether all these slots just take the likeliest token, and nothing is to be said about it."""
        asks = (self._draws, self._penalties, self._biased)
        return not any(table[slots].any() for table in asks) and bool(
            (self._logprobs[slots] == _NO_LOGPROBS).all()
        )

    def sample(
        self,
        logits: torch.Tensor,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        bitmask: torch.Tensor | None = None,
    ) -> SampledRows:
        """Choose a token for each row of `logits` [S, V]; `positions` are those of the tokens to be
        chosen, `bitmask` (int32 [S, ceil(V / 32)]) allows them.
        """
        if not len(slots):
            return SampledRows(torch.empty(0, dtype=torch.int64, device=self._device), list)
        if self._unending:
            self._allow_ends(slots, positions)
        wanted = int(self._logprobs[slots].max())
        at = upload(slots.astype(np.int64), self._device)
        params = self._tensors(at, slots, positions)
        if bitmask is not None:
            params = replace(params, bitmask=bitmask)
        chosen = sample(logits, params, None if wanted == _NO_LOGPROBS else wanted)
        if self._penalties[slots].any():
            assert self._counts is not None
            one = torch.ones_like(chosen.tokens, dtype=torch.int32)
            self._counts.index_put_((at, chosen.tokens.clamp(min=0)), one, accumulate=True)
        if wanted == _NO_LOGPROBS:
            return SampledRows(chosen.tokens, lambda: [])
        each = self._logprobs[slots].copy()
        return SampledRows(chosen.tokens, lambda: _logprob_rows(chosen, each))

    def _tensors(
        self, at: torch.Tensor, slots: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> SamplingTensors:
        drawn = bool(self._draws[slots].any())
        penalised = bool(self._penalties[slots].any())
        biased = bool(self._biased[slots].any())
        if not drawn:
            # Greedy rows read none of these: anything of the right shape will do, and costs no launch.
            rows = slice(len(slots))
            floats, ints, places = self._floats[rows], self._ints[rows], at
        else:
            floats, ints = self._floats[at], self._ints[at]
            places = upload(positions.astype(np.int64), self._device)
        if penalised:
            floats = self._floats[at]
        return SamplingTensors(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=ints[:, 0].to(torch.int32),
            seeds=ints[:, 1],
            positions=places,
            presence=floats[:, 3] if penalised else None,
            frequency=floats[:, 4] if penalised else None,
            repetition=floats[:, 5] if penalised else None,
            counts=self._counts if penalised else None,
            count_rows=at if penalised else None,
            bias_ids=self._bias_ids[at] if biased else None,
            bias_values=self._bias_values[at] if biased else None,
            all_greedy=not drawn,
            no_filters=not self._filters[slots].any(),
        )

    def _upload(self, values: Sequence[float], dtype: type[np.generic]) -> torch.Tensor:
        return upload(np.array(values, dtype=dtype), self._device)

    def _admit_penalties(
        self, slot: int, tokens: NDArray[np.int32], prompt_len: int, p: SamplingParams
    ) -> None:
        penalised = (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) != (0.0, 0.0, 1.0)
        if penalised or self._penalties[slot]:
            self._floats[slot, 3:] = self._upload(
                [p.presence_penalty, p.frequency_penalty, p.repetition_penalty], np.float32
            )
        self._penalties[slot] = penalised
        if not penalised:
            return
        if self._counts is None:
            shape = (len(self._floats), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        counts = np.bincount(tokens[prompt_len:], minlength=self._vocab_size).astype(np.int32)
        counts[tokens[:prompt_len]] |= IN_PROMPT
        self._counts[slot] = upload(counts, self._device)

    def _allow_ends(self, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Lift the ban on stop tokens from the slots that have reached their `min_tokens`."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            until, bias = self._unending.get(slot, (position + 1, {}))
            if position >= until:
                del self._unending[slot]
                self._admit_bias(slot, bias)

    def _admit_bias(self, slot: int, bias: dict[int, float]) -> None:
        if not bias and not self._biased[slot]:
            return
        self._biased[slot] = bool(bias)
        missing = len(bias) - self._bias_ids.shape[1]
        if missing > 0:
            self._bias_ids = torch.nn.functional.pad(self._bias_ids, (0, missing), value=-1)
            self._bias_values = torch.nn.functional.pad(self._bias_values, (0, missing))
        self._bias_ids[slot] = -1
        self._bias_ids[slot, : len(bias)] = self._upload(list(bias), np.int32)
        self._bias_values[slot, : len(bias)] = self._upload(list(bias.values()), np.float32)


def _logprob_rows(chosen: Sampled, each: NDArray[np.int32]) -> list[RowLogprobs | None]:
    """Logprobs for the rows that asked (`each` >= 0), cut to the number of alternatives that each asked
    for.
    """
    assert chosen.logprobs is not None
    values = chosen.logprobs.tolist()
    if chosen.top_tokens is None or chosen.top_logprobs is None:
        tops: list[list[tuple[int, float]]] = [[] for _ in values]
    else:
        pairs = zip(chosen.top_tokens.tolist(), chosen.top_logprobs.tolist(), strict=True)
        tops = [list(zip(ids, logs, strict=True)) for ids, logs in pairs]
    return [
        None if count == _NO_LOGPROBS else RowLogprobs(value, top[:count])
        for value, top, count in zip(values, tops, each.tolist(), strict=True)
    ]
