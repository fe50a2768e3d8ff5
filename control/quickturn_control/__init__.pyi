"""Quickturn's control plane: which request runs in the next step, and who owns which cache block.

Nothing here reads a clock, a random number or the environment: the same calls give the same plans. Times are float seconds on
any clock that the caller likes, as long as it never goes back.

    scheduler = Scheduler(SchedulerConfig(groups=[GroupConfig("full", 16)], num_slabs=100))
    scheduler.add(Request(1, tokens, max_tokens=64, stop_token_ids=[2], arrival=now))
    while (plan := scheduler.plan(now)) is not None and plan.num_rows:
        tokens = run(plan)                                     # one sampled token for each row with samples[r] == 1
        ended = scheduler.apply(StepResult(plan.step, tokens, elapsed_us=took))
"""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt8Array = NDArray[np.uint8]
GroupKind = Literal["full", "window", "state"]

STOP: Final = 0
"""Ended with a stop token, or by `finish`."""
LENGTH: Final = 1
"""Ended at `max_tokens`, at `max_context`, or because nothing else could give way to its next block."""
CANCELLED: Final = 2
TIMEOUT: Final = 3
ERROR: Final = 4

DEVICE: Final = 0
"""Tier 0. Tier t > 0 is `SchedulerConfig.tiers[t - 1]`."""

class GroupConfig:
    """A cache group: layers whose cache has one shape and one lifetime.

    `blocks_per_slab` blocks of this group fill a slab: block `b` lies in slab `b // blocks_per_slab`. A block holds
    `SchedulerConfig.block_tokens` tokens (full, window) or one state snapshot (state). `window` is the number of tokens seen
    back, the token itself included; only for kind "window". `name` appears in messages.
    """

    def __init__(self, kind: GroupKind, blocks_per_slab: int, *, window: int = 0, name: str = "") -> None: ...
    @property
    def kind(self) -> GroupKind: ...
    @property
    def blocks_per_slab(self) -> int: ...
    @property
    def window(self) -> int: ...
    @property
    def name(self) -> str: ...

class TierConfig:
    """A tier below the device: room for `blocks[g]` blocks of each group."""

    def __init__(self, name: str, blocks: Sequence[int]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def blocks(self) -> list[int]: ...

class Policy:
    """What the operator promises and how cache is kept. Times in seconds, 0 switches a bound off unless said otherwise.

    - `min_tps_per_user`: a step with decoding rows is filled up to 1 / min_tps_per_user seconds, and no request is admitted that
      would push pure decoding beyond it.
    - `max_gap_factor`: without `min_tps_per_user`, a step may take this many times what its decoding rows alone take.
    - `max_ttft`: a prefill that is about to miss it may use the whole `max_step_tokens`, unless `min_tps_per_user` forbids.
    - `max_pause`: where one long step brings prompts on at least twice as fast as pieces beside every step would, a step may take so
      long, once in `pause_every` steps (three may be saved up); what users lose is made up for before the next piece. 0: never.
    - `fairness`: a request with a short prefill passes those that arrived at most this long before it.
    - `share_wait`: longest wait for another request that computes the same prefix.
    - `checkpoint_stride`: tokens between state checkpoints inside a long prompt.
    - `checkpoint_tail`: a state checkpoint so many tokens before the end of a prompt: templates and clients rewrite the tail of a turn.
    - `eviction_hold`: what a block of mean recompute cost per byte is worth, as seconds of age.
    - `max_hold`, `max_hold_share`: bounds of `hold`: seconds, and share of the pool.
    - `demote_below`: cached blocks are copied to the next tier while less than this share of the pool is free.
    - `max_demotes_per_step`: transfers to a lower tier that one plan starts.
    """

    min_tps_per_user: float
    max_gap_factor: float
    max_ttft: float
    max_pause: float
    pause_every: int
    fairness: float
    share_wait: float
    checkpoint_stride: int
    checkpoint_tail: int
    eviction_hold: float
    max_hold: float
    max_hold_share: float
    demote_below: float
    max_demotes_per_step: int
    def __init__(
        self,
        *,
        min_tps_per_user: float = 0.0,
        max_gap_factor: float = 2.0,
        max_ttft: float = 0.0,
        max_pause: float = 0.0,
        pause_every: int = 128,
        fairness: float = 5.0,
        share_wait: float = 10.0,
        checkpoint_stride: int = 16384,
        checkpoint_tail: int = 384,
        eviction_hold: float = 30.0,
        max_hold: float = 300.0,
        max_hold_share: float = 0.5,
        demote_below: float = 0.25,
        max_demotes_per_step: int = 64,
    ) -> None: ...

class SchedulerConfig:
    """All that a scheduler is told at its start. Raises ValueError for what can't work, with the numbers.

    `block_tokens` is a power of two. `draft_tokens` is the most drafted tokens a decode row carries (speculation). `pipeline_depth`
    is the number of plans that may be out without their `apply` (2: overlap). `hash_key` (16 bytes) keys the prefix hash; give all
    ranks the same secret one. `model_salt` goes into every hash. `max_context` bounds prompt + answer of a request. `recorded` are
    (decode rows, tokens in all) of the steps with one prompt's piece that are launched as a whole: pieces are cut to their sizes.
    """

    def __init__(
        self,
        *,
        groups: Sequence[GroupConfig],
        num_slabs: int,
        block_tokens: int = 64,
        max_requests: int = 256,
        max_step_tokens: int = 2048,
        max_context: int = 1 << 30,
        prefix_cache: bool = True,
        draft_tokens: int = 0,
        pipeline_depth: int = 2,
        tiers: Sequence[TierConfig] = (),
        recorded: Sequence[tuple[int, int]] = (),
        policy: Policy = ...,
        hash_key: bytes = ...,
        model_salt: str = "",
        kv_events: bool = False,
    ) -> None: ...

class Request:
    """One turn to compute. `tokens` (int32, C-contiguous, at least one) is read during `add` only; nothing keeps it.

    `stop_token_ids` end the request (the stop token itself is delivered) once `min_tokens` were generated; an empty list ignores
    end-of-sequence. `priority`: higher goes first. `deadline`: absolute time after which it ends with TIMEOUT. `cache_salt` and
    `adapter` keep cached prefixes apart. `content` are (position, digest) pairs of what stands behind placeholder tokens.
    `boundaries` are token positions where a state checkpoint is worth having (end of system prompt, end of tools). `retention`
    keeps the blocks warm for so many seconds after the end, within `Policy.max_hold`. `fresh`: every token is computed, because the
    logits of each are wanted; nothing that others cached is used, though others may use what this one caches.
    """

    def __init__(
        self,
        id: int,
        tokens: Int32Array,
        *,
        max_tokens: int = 16,
        min_tokens: int = 0,
        stop_token_ids: Sequence[int] = (),
        arrival: float = 0.0,
        priority: int = 0,
        session: str = "",
        deadline: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        content: Sequence[tuple[int, int]] = (),
        boundaries: Sequence[int] = (),
        retention: float = 0.0,
        fresh: bool = False,
    ) -> None: ...
    @property
    def id(self) -> int: ...

class BlockUpdates:
    """New block-table entries of one group: table[slots[i], indexes[i]] = blocks[i], in this order."""

    slots: Int32Array
    indexes: Int32Array
    blocks: Int32Array

class Admitted:
    """Requests that got a slot. The runtime loads their first `known_tokens` tokens into `token_ids[slot]`; the first
    `cached_tokens` of them are in the cache already. A retracted request appears here again when it returns."""

    ids: Int64Array
    slots: Int32Array
    cached_tokens: Int32Array
    known_tokens: Int32Array

class Released:
    """Requests that lost their slot and cache for now. Tokens of theirs that are still on their way are delivered as usual."""

    ids: Int64Array
    slots: Int32Array

class Ended:
    """Requests that are over. `slots` is -1 for those that never ran. `reasons`: STOP, LENGTH, CANCELLED, TIMEOUT or ERROR."""

    ids: Int64Array
    slots: Int32Array
    reasons: Int32Array

class Applied(Ended):
    """What `apply` made of a step: the requests that it ended, and which tokens count.

    `accepted[i]` is the number of tokens of the i-th sampled row that belong to the answer: 0 for a row whose request was over
    already (the one extra token of overlap), less than `counts[i]` when it ended among its accepted drafts.
    """

    accepted: Int32Array

class Transfers:
    """Copies between tiers, block by block. Report each id with `transfers_done` once; until then nothing touches either side."""

    ids: Int64Array
    groups: Int32Array
    src_tiers: Int32Array
    src_blocks: Int32Array
    dst_tiers: Int32Array
    dst_blocks: Int32Array

class StepPlan:
    """One step as flat arrays. R rows, the first `num_decode_rows` decode. The arrays stay valid as long as the plan is referenced.

    Per row: `slots`, `query_lens` (tokens computed), `context_lens` (tokens in the cache before this step; with drafts on their
    way this is the upper bound and the device knows better), `samples` (1: the row's last position is sampled). No row reaches
    beyond prompt + max_tokens, drafts included.
    Per state group g: `state_in[g]`, `state_out[g]` (block read, block written), `state_zero[g]` (1: nothing is read, the state
    starts at zero; state_in is -1). For other groups these are empty, as `block_updates[g]` is for state groups.
    `transfers_before` may start at once, `transfers_after` when this step is done. `num_rows` 0: nothing to run, and no `apply`
    (`step` is -1); only what is listed changed.
    """

    @property
    def step(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_decode_rows(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def max_context_len(self) -> int:
        """The largest context_lens + query_lens of a row."""
    @property
    def slots(self) -> Int32Array: ...
    @property
    def query_lens(self) -> Int32Array: ...
    @property
    def context_lens(self) -> Int32Array: ...
    @property
    def samples(self) -> UInt8Array: ...
    @property
    def block_updates(self) -> list[BlockUpdates]: ...
    @property
    def state_in(self) -> list[Int32Array]: ...
    @property
    def state_out(self) -> list[Int32Array]: ...
    @property
    def state_zero(self) -> list[UInt8Array]: ...
    @property
    def admitted(self) -> Admitted: ...
    @property
    def released(self) -> Released: ...
    @property
    def ended(self) -> Ended:
        """Requests that ended outside `apply` since the last plan: cancelled, finished by the text side, failed, timed out."""
    @property
    def transfers_before(self) -> Transfers: ...
    @property
    def transfers_after(self) -> Transfers: ...

class StepResult:
    """What a step gave. `tokens`: int32, the sampled rows' tokens in row order; `counts`: how many of them each sampled row has
    (None: one each). `elapsed_us` is the measured time of the step, 0 if unknown."""

    def __init__(
        self, step: int, tokens: Int32Array, counts: Int32Array | None = None, elapsed_us: float = 0.0
    ) -> None: ...

class KvEvents:
    """What entered and left the prefix index, in order. `kinds`: 1 stored, 0 removed. `hashes` and `parents`: uint64 [n, 2]."""

    kinds: UInt8Array
    tiers: UInt8Array
    groups: UInt8Array
    hashes: NDArray[np.uint64]
    parents: NDArray[np.uint64]
    depths: Int32Array

class Scheduler:
    """One rank's scheduler. Not thread-safe; long calls release the GIL."""

    def __init__(self, config: SchedulerConfig) -> None: ...
    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError, with the numbers, for one that can never run (empty prompt, longer than the pool
        or `max_context`) and for an id in use."""
    def cancel(self, id: int) -> bool:
        """The client went away. Its private blocks are free as soon as no step or transfer uses them. False if it was over."""
    def finish(self, id: int) -> bool:
        """The text side found the answer's end (a stop string): as `cancel`, but a good end that keeps its checkpoints."""
    def fail(self, id: int) -> list[list[int]] | None:
        """What it computed is wrong (not a number, say): it ends with ERROR. The blocks that it found cached stay; what it
        computed itself, and whatever others computed behind that, is never found again. Returns, by group, the device's blocks
        that hold such things: before they are given out again, what they hold must go. None if it was over."""
    def hold(self, session: str, seconds: float) -> bool:
        """Keep the session's cache warm while its tool runs, within Policy.max_hold and max_hold_share. False if refused."""
    def plan(self, now: float) -> StepPlan | None:
        """The next step. None: nothing can run and nothing changed, or `pipeline_depth` plans wait for their `apply`."""
    def apply(self, result: StepResult) -> Applied:
        """Settle the oldest step that is out. Raises ValueError when `step`, `tokens` or `counts` don't belong to it."""
    def timed(self, step: int, elapsed_us: float) -> None:
        """What a step took whose `apply` didn't know it: ranks that plan alike are told by the one that measures. Raises
        ValueError for a step that isn't among the last few such."""
    def transfers_done(self, ids: Int64Array | Sequence[int]) -> None:
        """These transfers are complete. Raises ValueError for an unknown id."""
    def match(self, tokens: Int32Array, *, cache_salt: str = "", adapter: str = "") -> int:
        """Tokens of this prompt that a request could reuse now. Changes nothing."""
    def prefix_hashes(
        self, tokens: Int32Array, *, cache_salt: str = "", adapter: str = ""
    ) -> NDArray[np.uint64]:
        """Identities [n, 2] of the n full blocks of a prompt, as they appear in `take_events`."""
    def has_unfinished(self) -> bool:
        """Some request isn't over."""
    def stats(self) -> dict[str, float]:
        """Counters and gauges by name; docs/control-plane.md explains each. cached_tokens / ceiling_tokens is the measure of reuse."""
    def take_events(self) -> KvEvents:
        """Drain the stream of cache events (empty unless `kv_events`)."""
    def reset_prefix_cache(self) -> int:
        """Forget every cached block that nothing uses; the number of blocks freed."""
    def check(self) -> None:
        """Audit every invariant, O(everything). Raises RuntimeError with what is broken. For tests."""

def transitions() -> list[tuple[str, str, str]]:
    """The request state machine as the code has it: (state, event, next state)."""

def build_info() -> dict[str, str]:
    """Compiler, build type, sanitizers."""
