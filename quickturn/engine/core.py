"""The engine loop of one rank: ask the control plane for a plan, carry it out, say what happened.

The loop decides nothing. It keeps each live request's tokens on the host (a retracted request is loaded
again from them) and turns what the control plane reports into outputs for the client.
"""

import secrets
import time
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import quickturn_control as control
import torch
from numpy.typing import NDArray

from quickturn.config import EngineConfig
from quickturn.engine.constraints import ConstrainedRow, MaskTable, Waiting
from quickturn.engine.digest import plan_digest
from quickturn.engine.grammar import GrammarLimits, GrammarPool, tokenizer_info
from quickturn.engine.live import FINISH_REASONS, InFlight, LastStep, LiveRequest
from quickturn.engine.memory import room_for
from quickturn.engine.messages import (
    AddRequest,
    Admitted,
    CancelRequest,
    CheckConstraint,
    ConstraintChecked,
    EngineReady,
    EngineStats,
    HoldSession,
    LoadProgress,
    PromptScores,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)
from quickturn.engine.scores import pieces, scored_tokens
from quickturn.engine.seat import Seat
from quickturn.engine.start import StartedEngine, scheduler_config, start
from quickturn.execution.batch import GroupCounts, StateMoves, StepRows
from quickturn.execution.runner import BlockUpdate
from quickturn.execution.sampler import RowLogprobs
from quickturn.execution.scoring import ScoredChunk

_COMPILING_S = 0.002
"""How long a loop with nothing else to do sleeps while grammars are compiled."""

_SLOW_MASKS = 3
"""How many masks of one request may take long."""


class EngineCore:
    """One rank's engine, driven by whoever calls `step`; each of several ranks by the same calls of `plan`
    and `run`. Not thread-safe.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[LoadProgress], None] | None = None,
        seat: Seat | None = None,
    ) -> None:
        """Load the model and allocate the cache. Raises ValueError or MemoryError that say what to change.
        `seat`: None for one rank alone.
        """
        seat = seat or Seat()
        self._started: StartedEngine = start(config, progress or (lambda _: None), seat)
        self._runner = self._started.runner
        self._kinds = [laid.group.kind for laid in self._started.layout.groups]
        self._depth = 2 if self._started.overlap else 1
        max_context = self._started.ready.max_context
        self._scheduler = control.Scheduler(
            scheduler_config(
                config,
                self._started.layout,
                max_context,
                self._depth,
                seat.hash_key,
                self._runner.recorded_mixed(),
            )
        )
        self._live: dict[int, LiveRequest] = {}
        self._slot_request = np.full(config.max_requests, -1, dtype=np.int64)
        self._in_flight: deque[InFlight] = deque()
        self._undelivered: list[TokenOutput] = []
        self._news: list[PromptScores] = []
        self._announce: Callable[[Admitted], None] = lambda _: None
        self._finished: Counter[str] = Counter()
        self._generated = 0
        vocab_size = self._started.ready.vocab_size
        self.grammars = GrammarPool(
            lambda: tokenizer_info(config.model, vocab_size, self._started.eos_token_ids),
            # The first rank decides that a grammar takes too long.
            GrammarLimits() if seat.rank == 0 else GrammarLimits(seconds=config.rank_timeout),
        )
        self._waiting = Waiting(self.grammars)
        self._mask_table = MaskTable(config.max_requests, vocab_size)
        self._constrained = 0
        self.last_step = LastStep()
        self._alone = seat.mesh.world == 1
        self.digest = 0
        """Of all that was planned and sampled so far; not kept by a rank alone."""
        self.times: list[tuple[int, float]] = []
        """(step, microseconds) of settled steps that `tell_times` has to tell; empty for a rank alone."""
        self.too_slow: list[tuple[int, str]] = []
        """Requests that shall end, and why: a rank alone ends them itself."""

    def ready(self) -> EngineReady:
        """What clients must know of this engine."""
        return self._started.ready

    def add(self, request: AddRequest) -> None:
        """Take a request in. One that can never run is answered by the next `step` with finish 'error' and
        the reason.
        """
        sampling = request.sampling
        row: ConstrainedRow | None = None
        if sampling.constraint is not None:
            outcome = self.grammars.outcome(sampling.constraint)
            if outcome is None:
                self._waiting.hold(request)
                return
            if isinstance(outcome, str):
                self.reject(request.id, outcome)
                return
            ways = self.grammars.ways if sampling.constraint.closes else None
            row = ConstrainedRow(sampling.constraint, outcome, ways, sampling.max_tokens)
        tokens = array("i")
        tokens.frombytes(request.tokens)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._started.ready.vocab_size:
            self.reject(
                request.id, f"a token id is outside the vocabulary of {self._started.ready.vocab_size}"
            )
            return
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self._started.eos_token_ids)
        sampling = replace(sampling, stop_token_ids=tuple(sorted(stop_ids)))
        try:
            self._scheduler.add(
                control.Request(
                    request.id,
                    np.frombuffer(tokens, dtype=np.int32),
                    max_tokens=sampling.max_tokens,
                    min_tokens=sampling.min_tokens,
                    stop_token_ids=list(sampling.stop_token_ids),
                    arrival=request.arrival,
                    priority=request.priority,
                    session=request.session,
                    deadline=request.deadline,
                    cache_salt=request.cache_salt,
                    retention=request.retention,
                    boundaries=request.boundaries,
                    fresh=sampling.prompt_logprobs is not None,
                )
            )
        except ValueError as error:
            self.reject(request.id, str(error))
            return
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._constrained += row is not None
        self._live[request.id] = LiveRequest(request.id, tokens, len(tokens), sampling, seed, row=row)

    def cancel(self, request: CancelRequest) -> None:
        """End a request from outside; unknown ids (it ended just now) are fine."""
        self._waiting.drop(request.id)
        if request.finished:
            self._scheduler.finish(request.id)
        else:
            self._scheduler.cancel(request.id)

    def hold(self, request: HoldSession) -> None:
        """Keep a session's cache warm for a while; refused in silence when too much is held already."""
        self._scheduler.hold(request.session, request.seconds)

    def check(self, request: CheckConstraint) -> None:
        """Begin to compile a constraint."""
        self._waiting.check(request)

    def checked(self) -> list[ConstraintChecked]:
        """The constraints that were asked for and are decided now."""
        return self._waiting.checked()

    def announce(self, tell: Callable[[Admitted], None]) -> None:
        """Have `tell` called when requests get a place, before the step that they first take part in."""
        self._announce = tell

    def news(self) -> list[PromptScores]:
        """What clients must hear before the outputs of the last step."""
        news, self._news = self._news, []
        return news

    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._in_flight or self._live or self._undelivered or self._waiting)

    def step(self) -> StepOutput:
        """Launch the next step and settle the oldest one that is out; returns what is new for the clients."""
        for request in self._waiting.decided():
            self.add(request)
        if self._waiting and not self._live:
            time.sleep(_COMPILING_S)
        return StepOutput(self.run(self.plan(time.monotonic())))

    def plan(self, now: float) -> control.StepPlan | None:
        """What the next step will be; `now` in seconds of the clock that requests' times are of."""
        # Of the step before. Not everybody who drives an engine asks for it.
        self._news.clear()
        plan = self._scheduler.plan(now)
        if not self._alone and plan is not None:
            self.digest = plan_digest(plan, self.digest)
        return plan

    def run(self, plan: control.StepPlan | None, groups: GroupCounts | None = None) -> list[TokenOutput]:
        """Launch that step and settle the oldest one that is out; returns what is new for the clients.

        `groups`: what every group of requests runs in this step, where there are several; with nothing of its
        own to run, a rank helps the others.
        """
        outputs, self._undelivered = self._undelivered, []
        if plan is not None:
            self._take_changes(plan, outputs)
        if plan is not None and plan.num_rows:
            self._launch(plan, groups, outputs)
            waits = len(self._in_flight) < self._depth
        else:
            if groups is not None:
                self._runner.help_out(groups)
            waits = not self._in_flight
        if not waits:
            self._settle(self._in_flight.popleft(), outputs)
        return outputs

    def scored_tokens(self, plan: control.StepPlan) -> int:
        """How many tokens of prompts a plan scores, before it runs."""
        return scored_tokens(plan, self._slot_request, self._live)

    def tell_times(self, times: Sequence[tuple[int, float]]) -> None:
        """What settled steps took, (step, microseconds), by the clock of the rank that measures."""
        for step, elapsed_us in times:
            self._scheduler.timed(step, elapsed_us)

    def stop(self, id: int, why: str) -> None:
        """End a request with an error; unknown ids (it ended just now) are fine."""
        if id in self._live:
            self._live[id].error = why
            self._scheduler.cancel(id)

    def prefix_hashes(self, tokens: NDArray[np.int32], salt: str) -> NDArray[np.uint64]:
        """Identities [n, 2] of the full blocks of a prompt."""
        return self._scheduler.prefix_hashes(tokens, cache_salt=salt)

    def stats(self) -> EngineStats:
        """Counters and gauges of the control plane and of this loop."""
        values = dict(self._scheduler.stats())
        values["generated_tokens"] = float(self._generated)
        values["step_seconds"] = self.last_step.seconds
        for reason in FINISH_REASONS.values():
            values[f"finished_{reason}"] = float(self._finished[reason])
        for path, count in self._runner.steps.items():
            values[f"steps_{path}"] = float(count)
        return EngineStats(values)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the arena."""
        return self._started.layout.total_bytes

    def skip_prompts(self) -> None:
        """See `Runner.skip_prompts`."""
        self._runner.skip_prompts()

    def step_bytes(self, rows: int, context: int) -> int:
        """The least bytes that a decode step moves: each weight that it needs once, the cache of `rows`
        contexts, and each state to and fro.
        """
        return self._started.weights.read_by(rows) + self._started.layout.bytes_read(rows, context)

    def close(self) -> None:
        """Wait for what the device still does."""
        while self._in_flight:
            self._in_flight.popleft().pending.wait()

    def _take_changes(self, plan: control.StepPlan, outputs: list[TokenOutput]) -> None:
        ended = plan.ended
        for id, reason in zip(ended.ids.tolist(), ended.reasons.tolist(), strict=True):
            outputs.append(self._end(id, [], reason))
        admitted = plan.admitted
        for id, slot, cached, known in zip(
            admitted.ids.tolist(),
            admitted.slots.tolist(),
            admitted.cached_tokens.tolist(),
            admitted.known_tokens.tolist(),
            strict=True,
        ):
            self._admit(self._live[id], slot, cached, known)
        if len(admitted.ids):
            self._announce(Admitted(admitted.ids.tolist()))

    def _launch(self, plan: control.StepPlan, groups: GroupCounts | None, outputs: list[TokenOutput]) -> None:
        moves = zip(plan.state_in, plan.state_out, plan.state_zero, strict=True)
        states = tuple(
            StateMoves(*arrays) for arrays, kind in zip(moves, self._kinds, strict=True) if kind == "state"
        )
        rows = StepRows(
            plan.slots, plan.query_lens, plan.context_lens, plan.samples, plan.num_decode_rows, states
        )
        updates = [BlockUpdate(u.slots, u.indexes, u.blocks) for u in plan.block_updates]
        requests = self._slot_request[rows.slots[rows.samples != 0]].tolist()
        masks = None
        if self._constrained and any(self._row_of(id) is not None for id in requests):

            def masks() -> torch.Tensor | None:
                return self._masks(requests, outputs)

        with room_for(f"a step of {plan.num_tokens} tokens", "lower --memory or --max-step-tokens"):
            pending = self._runner.launch(rows, updates, masks, groups)
        scored = self._slot_request[pending.scored_slots].tolist() if pending.scored_slots else ()
        self._in_flight.append(InFlight(plan.step, requests, scored, pending))
        self.last_step = LastStep(plan.num_rows, plan.num_decode_rows, plan.num_tokens)

    def _admit(self, live: LiveRequest, slot: int, cached: int, known: int) -> None:
        if live.cached_tokens < 0:
            live.cached_tokens = min(cached, live.prompt_len)
        self._slot_request[slot] = live.id
        tokens: NDArray[np.int32] = np.array(live.tokens[:known], dtype=np.int32)
        self._runner.admit(slot, tokens, live.prompt_len, live.sampling, live.seed)

    def _row_of(self, id: int) -> ConstrainedRow | None:
        live = self._live.get(id)
        return None if live is None else live.row

    def _masks(self, requests: Sequence[int], outputs: list[TokenOutput]) -> torch.Tensor | None:
        """The tokens that the sampled rows of a step may take: int32 [S, words] on the host; None if all may.

        Called while the device computes the step's logits. The tokens of the step before are needed, and are
        there: the device finished them before it began with this one.
        """
        while self._in_flight:
            self._settle(self._in_flight.popleft(), outputs)
        mask, slow = self._mask_table.fill([self._row_of(id) for id in requests])
        for index in slow:
            self._count_slow(self._live[requests[index]])
        return mask

    def _count_slow(self, live: LiveRequest) -> None:
        """A grammar with too many ways to read a text would make every request wait for it."""
        live.slow_masks += 1
        if live.slow_masks == _SLOW_MASKS:
            why = "the grammar can read its text in too many ways to keep up: make it less ambiguous"
            if self._alone:
                self.stop(live.id, why)
            else:
                self.too_slow.append((live.id, why))

    def _settle(self, flight: InFlight, outputs: list[TokenOutput]) -> None:
        result = flight.pending.wait()
        elapsed_us = 1e6 * result.seconds
        tokens = result.tokens.tolist()
        for id, token in zip(flight.requests, tokens, strict=True):
            if token < 0 and id in self._live:
                self._fail(id)
        for id, chunk in zip(flight.scored, result.scores, strict=True):
            self._tell_scores(id, chunk)
        if not self._alone:
            self.times.append((flight.step, elapsed_us))
            self.digest = zlib.crc32(result.tokens.data, self.digest)
            elapsed_us = 0.0
        applied = self._scheduler.apply(control.StepResult(flight.step, result.tokens, elapsed_us=elapsed_us))
        ended = dict(zip(applied.ids.tolist(), applied.reasons.tolist(), strict=True))
        logprobs = result.logprobs or [None] * len(tokens)
        for id, token, accepted, logprob in zip(
            flight.requests, tokens, applied.accepted.tolist(), logprobs, strict=True
        ):
            if accepted:
                self._advance(self._live[id], token)
                outputs.append(self._output(id, token, logprob, ended.pop(id, None)))
        for id, reason in ended.items():
            outputs.append(self._end(id, [], reason))
        self.last_step = LastStep(
            self.last_step.rows, self.last_step.decode_rows, self.last_step.tokens, result.seconds
        )

    def _tell_scores(self, id: int, chunk: ScoredChunk) -> None:
        live = self._live.get(id)
        if live is None or live.error:
            return
        if not chunk.finite:
            self._fail(id)
            return
        self._news += pieces(id, chunk, live.scored)
        live.scored = max(live.scored, chunk.start + len(chunk.logprobs))

    def _advance(self, live: LiveRequest, token: int) -> None:
        live.tokens.append(token)
        if live.row is not None and not live.row.accept(token):
            self.stop(live.id, "the model wrote what the grammar doesn't allow; this request can't go on")

    def _output(self, id: int, token: int, logprob: RowLogprobs | None, reason: int | None) -> TokenOutput:
        self._generated += 1
        details = None if logprob is None else [TokenLogprobs(logprob.logprob, logprob.top)]
        if reason is not None:
            return self._end(id, [token], reason, details)
        live = self._live[id]
        cached = -1 if live.reported else live.cached_tokens
        live.reported = True
        return TokenOutput(id, [token], cached_tokens=cached, logprobs=details)

    def _end(
        self, id: int, tokens: list[int], reason: int, logprobs: list[TokenLogprobs] | None = None
    ) -> TokenOutput:
        live = self._live.pop(id)
        self._constrained -= live.row is not None
        finish = "error" if live.error else FINISH_REASONS[reason]
        if finish == "stop" and live.row is not None and live.row.cut:
            finish = "length"
        self._finished[finish] += 1
        cached = -1 if live.reported else max(live.cached_tokens, 0)
        return TokenOutput(id, tokens, finish, cached, logprobs, live.error)

    def _fail(self, id: int) -> None:
        """End a request whose logits are not finite: nobody starts from what it computed, or meets it in a
        block that was freed.
        """
        self._live[id].error = "the model's output is not a finite number; this request can't go on"
        self._runner.spoil(self._scheduler.fail(id) or [])

    def reject(self, id: int, message: str) -> None:
        """Answer a request that was never taken in, with the next step."""
        self._finished["error"] += 1
        self._undelivered.append(TokenOutput(id, [], "error", 0, None, message))
