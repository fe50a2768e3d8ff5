"""What the server process and the engine process say to each other (msgpack over ZeroMQ).

`encode` and the two `decode` functions are the whole codec. Token ids travel as little-endian int32 bytes, so
that a prompt of 200k tokens is one memory copy and not 200k Python objects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, cast, get_args

from quickturn.sampling_params import Constraint, SamplingParams


@dataclass(frozen=True, slots=True)
class AddRequest:
    """A new request. `tokens` are int32 little-endian; `arrival` is `time.monotonic()` in seconds.
    `boundaries`: positions in the prompt where others are likely to part from it (end of tools and system
    prompt).
    """

    id: int
    tokens: bytes
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    session: str = ""
    cache_salt: str = ""
    deadline: float | None = None
    retention: float = 0.0
    """Seconds for which the cache of this turn is worth keeping once it is over."""
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HoldSession:
    """The session's next request will come soon (a tool runs): keep its cache warm for so many seconds."""

    session: str
    seconds: float


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """The client went away, or a stop string was found (`finished`: the answer is good and stays cached)."""

    id: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class CheckConstraint:
    """Compile a constraint ahead of the requests that need it; answered by `ConstraintChecked`."""

    id: int
    constraint: Constraint


@dataclass(frozen=True, slots=True)
class AskStats:
    """Ask for one `EngineStats`."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop after the current step."""


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Progress of the start: `stage` is a short name, `done` of `total` (0: unknown)."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The engine serves. `facts` are the figures worth a line in the log (cache tokens, dtype, kernels)."""

    max_context: int
    max_requests: int
    cache_tokens: int
    block_tokens: int
    vocab_size: int
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the chosen token and of the likeliest ones as (token id, logprob), best first."""

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(NamedTuple):
    """New tokens of a request. `finish`: '' while it runs, else stop, length, cancelled, timeout or error.

    A tuple: one is made, packed and unpacked for every token, at a third of a dataclass's time.
    """

    id: int
    tokens: list[int]
    finish: str = ""
    cached_tokens: int = -1
    """Prompt tokens that were not computed again; -1 except on the first output of a request."""
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class PromptScores:
    """How likely the model found N tokens of a request's prompt, from position `start` on (the first token
    of a prompt has no score). Little-endian: logprobs float32 [N]; ranks int32 [N], how many tokens were at
    least as likely; top_tokens int32 [N, n] and top_logprobs float32 [N, n], the likeliest ones, best
    first.
    """

    id: int
    start: int
    logprobs: bytes
    ranks: bytes
    top_tokens: bytes
    top_logprobs: bytes


@dataclass(frozen=True, slots=True)
class Admitted:
    """These requests have a place: from now on they run, and wait for nobody."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All outputs of one step, one message however many requests run."""

    outputs: list[TokenOutput]


@dataclass(frozen=True, slots=True)
class ConstraintChecked:
    """A constraint is ready for use, or `error` says why it can't be used."""

    id: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters and gauges for `/metrics`; the names are those of the metrics page."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine can't go on; `message` says what to change."""

    message: str


ToEngine = AddRequest | CancelRequest | HoldSession | AskStats | Shutdown | CheckConstraint
FromEngine = (
    LoadProgress
    | EngineReady
    | StepOutput
    | EngineStats
    | EngineFailed
    | ConstraintChecked
    | PromptScores
    | Admitted
)


def encode(message: ToEngine | FromEngine) -> bytes:
    """One byte that says which message, then its fields in msgpack."""
    return _codec().encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """What `encode` made of a message to the engine. Raises msgspec.DecodeError for anything else."""
    return cast(ToEngine, _codec().decode(data))


def decode_from_engine(data: bytes) -> FromEngine:
    """What `encode` made of a message from the engine. Raises msgspec.DecodeError for anything else."""
    return cast(FromEngine, _codec().decode(data))


class _Codec:
    """Needs msgspec, which an engine without a server does not: made on first use."""

    def __init__(self) -> None:
        import msgspec

        kinds: tuple[type, ...] = (*get_args(ToEngine), *get_args(FromEngine))
        self._tags = {kind: bytes([tag]) for tag, kind in enumerate(kinds)}
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoders: list[Callable[[memoryview], object]] = [
            msgspec.msgpack.Decoder(kind).decode for kind in kinds
        ]

    def encode(self, message: object) -> bytes:
        return self._tags[type(message)] + self._encode(message)

    def decode(self, data: bytes) -> object:
        return self._decoders[data[0]](memoryview(data)[1:])


@cache
def _codec() -> _Codec:
    return _Codec()
