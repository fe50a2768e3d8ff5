"""What the server process and the engine process say to each other (msgpack over ZeroMQ).

Every message is a tagged struct; `encode` and `decode` are the whole codec. Token ids travel as little-endian int32 bytes, so
that a prompt of 200k tokens is one memory copy and not 200k Python objects.
"""

import msgspec

from quickturn.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    """A new request. `tokens` are int32 little-endian; `arrival` is `time.monotonic()` in seconds."""

    id: int
    tokens: bytes
    sampling: SamplingParams
    arrival: float
    priority: int = 0
    session: str = ""
    cache_salt: str = ""
    deadline: float | None = None


class CancelRequest(msgspec.Struct, tag="cancel", frozen=True):
    """The client went away, or a stop string was found (`finished`: what was computed is kept as a good answer)."""

    id: int
    finished: bool = False


class AskStats(msgspec.Struct, tag="ask_stats", frozen=True):
    """Ask for one `EngineStats`."""


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave the loop after the current step."""


class LoadProgress(msgspec.Struct, tag="progress", frozen=True):
    """Progress of the start: `stage` is a short name, `done` of `total` (0: unknown)."""

    stage: str
    done: int
    total: int


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    """The engine serves. `facts` are the figures worth a line in the log (cache tokens, dtype, kernels)."""

    max_context: int
    max_requests: int
    cache_tokens: int
    block_tokens: int
    vocab_size: int
    facts: dict[str, str]


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of one token: the chosen one, and the alternatives as (token id, logprob), best first."""

    logprob: float
    top: list[tuple[int, float]]


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request. `finish` is '' while it runs, else stop, length, cancelled, timeout or error."""

    id: int
    tokens: list[int]
    finish: str = ""
    cached_tokens: int = -1
    """Prompt tokens that were not computed again; -1 except on the first output of a request."""
    logprobs: list[TokenLogprobs] | None = None
    error: str = ""


class StepOutput(msgspec.Struct, tag="step", frozen=True):
    """All outputs of one step, one message however many requests run."""

    outputs: list[TokenOutput]


class EngineStats(msgspec.Struct, tag="stats", frozen=True):
    """Counters and gauges for `/metrics`; the names are those of the metrics page."""

    values: dict[str, float]


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine can't go on; `message` says what to change."""

    message: str


ToEngine = AddRequest | CancelRequest | AskStats | Shutdown
FromEngine = LoadProgress | EngineReady | StepOutput | EngineStats | EngineFailed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
