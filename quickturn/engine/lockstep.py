"""What ranks say to each other so that all of them take the same steps (msgpack over links).

A step, for which the first rank of all gives the word:

1. `Batch` to every rank: what to tell its scheduler, and what time it is. Each plans its step.
2. With several groups of requests, the first rank of each group answers with a `Report`.
3. `Go` to every rank: who runs how many tokens, and what the plans of the group must look like.
"""

import msgspec

from quickturn.sampling_params import Constraint


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The start: where the ranks' store listens, and the key of prefix hashes."""

    store_host: str
    store_port: int
    hash_key: bytes


class Agree(msgspec.Struct, frozen=True, tag=True):
    """A number of one rank's own; answered with the least of all."""

    value: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """What happens before a step is planned, in this order.

    `times`: (step, microseconds) of steps that are settled. `stops`: (request, why) of requests that end with
    an error. `constraints`: grammars that requests will need. `messages`: to the engine, encoded. `now`:
    seconds of the first rank's clock. `stats`: the report shall have them.
    """

    now: float
    times: list[tuple[int, float]] = []
    stops: list[tuple[int, str]] = []
    constraints: list[Constraint] = []
    messages: list[bytes] = []
    stats: bool = False


class Report(msgspec.Struct, frozen=True, tag=True):
    """A group's plan for this step, and what it has to say of those before: outputs (an encoded
    `StepOutput`), what steps took, requests that have to end, whether it has more to do, its counters,
    requests that have a place now, scores of prompts (encoded, to be told before the outputs).

    Of the plan: tokens, sampled rows, tokens of prompts that are scored, rows, and decode rows of those.
    """

    tokens: int
    samples: int
    digest: int
    outputs: bytes = b""
    times: list[tuple[int, float]] = []
    stops: list[tuple[int, str]] = []
    busy: bool = False
    stats: dict[str, float] = {}
    admitted: list[int] = []
    scored: int = 0
    rows: int = 0
    decode_rows: int = 0
    news: list[bytes] = []

    @property
    def decodes(self) -> bool:
        """Whether the plan is of nothing but decode rows that are sampled from, or of nothing."""
        return not self.scored and self.decode_rows == self.samples == self.tokens


class Go(msgspec.Struct, frozen=True, tag=True):
    """Run the step. Of each group of requests: tokens, sampled rows and scored tokens (empty where there is
    one group), and the digest of all that its ranks planned and sampled so far. `decode_rows`: the most of
    any group if all run such rows alone, or nothing; else 0.
    """

    digests: list[int]
    tokens: list[int] = []
    samples: list[int] = []
    scored: list[int] = []
    decode_rows: int = 0


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The end."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """A rank gets on with its start; `stage` is a short name."""

    stage: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank can't go on. `follows`: it was cut off from another, which is more to blame."""

    message: str
    follows: bool = False


Said = Hello | Agree | Batch | Report | Go | Leave | Alive | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def pack(message: Said) -> bytes:
    """Bytes for a link."""
    return _encoder.encode(message)


def unpack(data: bytes) -> Said:
    """What `pack` was given. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(data)
