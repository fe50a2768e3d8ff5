"""What a step of the model and a move between ranks are expected to take.

Every term is written down here and in docs/parallel.md, so that a measurement can check it. With B the bytes
of the whole tensor (what an all-gather ends with, what a reduce-scatter begins with), n the ranks that take
part, L what a rank can send while it receives, and a collective's `start` and `per_rank`:

    all_gather, reduce_scatter     start + per_rank (n - 1) + (n - 1)/n B / L
    all_to_all                     the same, with B the bytes that one rank has
    all_reduce, in one exchange    start + per_rank (n - 1) + (n - 1) B / L
    all_reduce, in two             2 (start + per_rank (n - 1) + (n - 1)/n B / L)     whichever is less
    tokens to their experts        two all_to_all, of the rows that go out and of those that come back; a row
                                   for each of min(top_k, n) ranks, and ahead of them one of row counts, and
                                   `host`; where a step decodes, in a CUDA graph, a row for each of n ranks
    a kernel                       launch + max(bytes it reads and writes / memory, operations / compute)
"""

from dataclasses import dataclass
from typing import Literal

from quickturn.parallel.program import FusedKind, MoveKind

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class Exchange:
    """One exchange of messages between ranks: seconds until the first byte, more for each further rank, and
    the share of the link that large messages reach.
    """

    start: float
    per_rank: float
    efficiency: float


@dataclass(frozen=True)
class Hardware:
    """Rates of one rank: memory and link in bytes/s, compute in operations/s, launch and host in seconds; the
    latter is what is lost where the host waits for a number from the device.
    """

    name: str
    memory: float
    compute: float
    launch: float
    link: float
    exchanges: tuple[tuple[Collective, Exchange], ...]
    host: float = 2.0e-5

    def exchange(self, collective: Collective) -> Exchange:
        """The terms of a collective."""
        return dict(self.exchanges)[collective]


H200 = Hardware(
    name="H200, NVLink",
    memory=4.268e12,
    compute=7.0e14,
    launch=2.0e-6,
    link=4.5e11,
    exchanges=(
        ("all_reduce", Exchange(4.0e-6, 0.2e-6, 0.8)),
        ("all_gather", Exchange(4.0e-6, 0.2e-6, 0.8)),
        ("reduce_scatter", Exchange(4.0e-6, 0.2e-6, 0.8)),
        ("all_to_all", Exchange(5.0e-6, 0.3e-6, 0.7)),
    ),
)
"""Memory and compute as measured (docs/performance.md); launch: the least that a kernel takes in a CUDA
graph; link: NVLink 4's 450 GB/s in each direction. The terms of exchanges and `host` are estimates,
not measured here yet."""


@dataclass(frozen=True)
class Load:
    """What a step has to do, in each group of requests: tokens, how many of them are sampled, requests, and
    the tokens that each has in the cache.
    """

    tokens: int
    samples: int
    requests: int
    context: int

    @property
    def decodes(self) -> bool:
        """Whether every token is one of a request that already answers."""
        return self.tokens == self.requests


def decode_load(batch: int, context: int) -> Load:
    """One token for each of `batch` requests."""
    return Load(batch, batch, batch, context)


def prefill_load(tokens: int) -> Load:
    """So many tokens of one prompt."""
    return Load(tokens, 1, 1, tokens)


COLLECTIVE_OF: dict[MoveKind, Collective] = {
    "all_reduce": "all_reduce",
    "all_gather_tokens": "all_gather",
    "all_gather_features": "all_gather",
    "reduce_scatter_tokens": "reduce_scatter",
    "reduce_scatter_features": "reduce_scatter",
    "all_to_all_to_tokens": "all_to_all",
    "all_to_all_to_features": "all_to_all",
}


def wire_bytes(collective: Collective, ranks: int, size: float, hardware: Hardware) -> float:
    """What each rank sends of a tensor of `size` bytes."""
    if ranks == 1:
        return 0.0
    if collective == "all_reduce":
        once, twice = _all_reduce(ranks, size, hardware)
        return (ranks - 1) * size if once <= twice else 2 * (ranks - 1) / ranks * size
    return (ranks - 1) / ranks * size


def collective_seconds(collective: Collective, ranks: int, size: float, hardware: Hardware) -> float:
    """What it takes over `ranks` ranks, with a tensor of `size` bytes."""
    if ranks == 1:
        return 0.0
    if collective == "all_reduce":
        return min(_all_reduce(ranks, size, hardware))
    return _exchange(hardware, collective, ranks, (ranks - 1) / ranks * size)


def kernel_seconds(size: float, operations: float, hardware: Hardware) -> float:
    """What a kernel takes that reads and writes `size` bytes and computes so many operations."""
    return hardware.launch + max(size / hardware.memory, operations / hardware.compute)


@dataclass(frozen=True)
class Fusion:
    """A move and the `add_norm` step behind it as one instruction. It reads and writes the activations that
    often less than the two would, in so many kernels less.
    """

    kind: FusedKind
    passes: int
    launches: int


FUSIONS: dict[MoveKind, Fusion] = {
    "all_reduce": Fusion("all_reduce_add_norm", passes=1, launches=1),
    "reduce_scatter_tokens": Fusion("reduce_scatter_add_norm", passes=1, launches=1),
}


def _all_reduce(ranks: int, size: float, hardware: Hardware) -> tuple[float, float]:
    once = _exchange(hardware, "all_reduce", ranks, (ranks - 1) * size)
    return once, 2 * _exchange(hardware, "all_reduce", ranks, (ranks - 1) / ranks * size)


def _exchange(hardware: Hardware, collective: Collective, ranks: int, sent: float) -> float:
    terms = hardware.exchange(collective)
    return terms.start + terms.per_rank * (ranks - 1) + sent / (hardware.link * terms.efficiency)
