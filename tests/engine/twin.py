"""A second runner that takes every step of an engine kernel by kernel, and must leave the same bytes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from driving import Driver
from numpy.typing import NDArray
from quickturn_kernels.ops.linear import cpu as linear_on_cpu
from torch.overrides import TorchFunctionMode

from quickturn.execution.batch import GroupCounts, StepRows
from quickturn.execution.runner import BlockUpdate, PendingStep, StepTokens
from quickturn.sampling_params import SamplingParams

GARBAGE = 1e5
"""What nobody has written yet: finite, because attention gives such keys no weight."""
NO_TOKEN = 1 << 30
"""What the padding slot holds."""


def row_by_row(patch: pytest.MonkeyPatch) -> None:
    """On a CPU a row of a product has the same bits whatever rows are beside it, as all other ops have it."""

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = [weight @ row for row in x.reshape(-1, x.shape[-1])]
        out = torch.stack(rows).view(*x.shape[:-1], -1) if rows else x.new_empty((*x.shape[:-1], len(weight)))
        return out if bias is None else out + bias

    patch.setattr(linear_on_cpu, "STREAM_ROWS", 0)
    patch.setattr(torch.nn.functional, "linear", linear)


class Rounded(TorchFunctionMode):
    """Such functions by way of float64: else a number's last bit depends on whether it is one of a vector or
    of what is left over at the end.
    """

    NAMES = frozenset({"exp", "sigmoid", "softplus", "silu", "rsqrt"})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in self.NAMES and args[0].dtype == torch.float32:
            return func(args[0].double(), *args[1:], **(kwargs or {})).float()
        return func(*args, **(kwargs or {}))


class Known(PendingStep):
    """A step that is done, and took a time made up."""

    def __init__(self, tokens: StepTokens) -> None:
        self.scored_slots = []
        self._known = tokens

    def wait(self) -> StepTokens:
        return self._known


class Twin:
    """Sits between the loop and the runner of a driver's engine, whose recorded steps run eagerly.

    `other`: an engine on the same model that records nothing. Both caches begin as garbage. After each step
    tokens, log-probabilities, known tokens and all bytes of the caches must be equal. Times of steps are
    drawn, so that the schedule follows from the seed.
    """

    def __init__(
        self,
        driver: Driver,
        other: Driver,
        rng: np.random.Generator,
        masked: float = 0.0,
        tolerance: float | None = None,
    ) -> None:
        """`masked`: the share of steps in which sampled rows may not take just any token. `tolerance`: so far
        apart may numbers in the caches be, and tokens aren't compared.
        """
        self._masked, self._vocab = masked, driver.core.ready().vocab_size
        self._tolerance = tolerance
        self._runner, self._other = driver.core._runner, other.core._runner
        self._rng = rng
        self._launch, self._admit = self._runner.launch, self._runner.admit
        self._runner.launch, self._runner.admit = self.launch, self.admit  # type: ignore[method-assign]
        for runner in (self._runner, self._other):
            runner.arena._bytes.view(torch.float32).fill_(GARBAGE)
        batch = self._runner._batch
        batch.token_ids[batch.padding_slot] = NO_TOKEN
        for table in batch.block_tables:
            table[batch.padding_slot] = 0

    def admit(
        self, slot: int, tokens: NDArray[np.int32], prompt_len: int, sampling: SamplingParams, seed: int
    ) -> None:
        """Admit to both."""
        self._admit(slot, tokens, prompt_len, sampling, seed)
        self._other.admit(slot, tokens, prompt_len, sampling, seed)

    def launch(
        self,
        rows: StepRows,
        updates: Sequence[BlockUpdate],
        masks: Callable[[], torch.Tensor | None] | None = None,
        groups: GroupCounts | None = None,
    ) -> PendingStep:
        """Run a step on both and compare."""
        assert masks is None
        asked = self._random_mask(int(rows.samples.sum()))
        got = self._launch(rows, updates, asked, groups).wait()
        expected = self._other.launch(rows, updates, asked, groups).wait()
        what = f"a step of {rows.query_lens.tolist()} tokens behind {rows.context_lens.tolist()}"
        slots = self._runner._batch.max_requests
        mine, theirs = self._runner._batch.token_ids, self._other._batch.token_ids
        assert bool((mine[slots] == NO_TOKEN).all()), what
        cache, judge = self._runner.arena._bytes, self._other.arena._bytes
        if self._tolerance is None:
            assert got.tokens.tolist() == expected.tokens.tolist(), what
            assert got.logprobs == expected.logprobs, what
            assert mine[:slots].equal(theirs[:slots]), what
            assert cache.equal(judge), what
        else:
            worst = float((cache.view(torch.float32) - judge.view(torch.float32)).abs().max())
            assert worst <= self._tolerance, f"{worst} apart after {what}"
            theirs[:slots] = mine[:slots]
            judge.copy_(cache)
        return Known(replace(got, seconds=float(self._rng.uniform(1e-3, 1e-2))))

    def _random_mask(self, rows: int) -> Callable[[], torch.Tensor] | None:
        if self._rng.random() >= self._masked:
            return None
        bits = self._rng.integers(-(1 << 31), 1 << 31, (rows, -(-self._vocab // 32)))
        # Whatever is drawn, one token is allowed.
        mask = torch.from_numpy((bits | 8).astype(np.int32))
        return lambda: mask
