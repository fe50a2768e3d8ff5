"""What the loop remembers of requests and of steps."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import quickturn_control as control

from quickturn.engine.constraints import ConstrainedRow
from quickturn.execution.runner import PendingStep
from quickturn.sampling_params import SamplingParams

FINISH_REASONS = {
    control.STOP: "stop",
    control.LENGTH: "length",
    control.CANCELLED: "cancelled",
    control.TIMEOUT: "timeout",
    control.ERROR: "error",
}


@dataclass
class LiveRequest:
    """What the host knows of a request that isn't over. `tokens`: the prompt and what was generated so
    far.
    """

    id: int
    tokens: "array[int]"
    prompt_len: int
    sampling: SamplingParams
    seed: int
    cached_tokens: int = -1
    reported: bool = False
    error: str = ""
    row: ConstrainedRow | None = None
    slow_masks: int = 0
    scored: int = 1
    """The first position of the prompt whose score wasn't told yet."""


@dataclass(frozen=True)
class InFlight:
    """A launched step. `requests`: the ids behind the rows that sample, in row order. `scored`: those whose
    prompts are scored.
    """

    step: int
    requests: Sequence[int]
    scored: Sequence[int]
    pending: PendingStep


@dataclass(frozen=True)
class LastStep:
    """Facts about the last step that was launched, for benchmarks. `seconds`: what the last one that was
    settled took.
    """

    rows: int = 0
    decode_rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
