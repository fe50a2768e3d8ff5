"""What the compiler knows of a step: how it is placed, how wide its activations are, and what work it is."""

from dataclasses import dataclass, replace

from quickturn.parallel.cost import Hardware, Load, collective_seconds, kernel_seconds
from quickturn.parallel.placement import Placed


@dataclass(frozen=True)
class ExpertWork:
    """Experts of one rank: their number, out of how many each token takes `top_k`, bytes of one, operations
    of one for a token.
    """

    here: int
    count: int
    top_k: int
    bytes: float
    operations: float

    def touched(self, tokens: float) -> float:
        """Experts of this rank that so many tokens are expected to take, if all are equally likely."""
        untouched: float = (1 - self.top_k / self.count) ** tokens
        return self.here * (1 - untouched)


@dataclass(frozen=True)
class CacheWork:
    """What one rank reads of the cache: bytes for each token of a request's context (of the last `window` if
    that isn't 0) and for each request, and operations for each pair of new token and token of the context.
    Of `parts` ranks that share out the context's tokens each reads its own, when it decodes.
    """

    token_bytes: float = 0.0
    window: int = 0
    request_bytes: float = 0.0
    operations: float = 0.0
    parts: int = 1

    def size(self, load: Load) -> float:
        """Bytes read in a step."""
        return load.requests * (self.request_bytes + self.token_bytes * self._seen(load))

    def work(self, load: Load) -> float:
        """Operations in a step; a prompt's tokens see half of what the last of them sees."""
        share = 1.0 if load.decodes else 0.5
        return share * self.operations * load.tokens * self._seen(load)

    def _seen(self, load: Load) -> float:
        seen = min(load.context, self.window) if self.window else load.context
        return seen / self.parts if load.decodes else seen


@dataclass(frozen=True)
class Merge:
    """What `ranks` that share out a context put together inside of a step: when they decode, their results,
    so many bytes of each token on one of them; else all keys and values, so many of each token of the
    context.
    """

    ranks: int
    result_bytes: float
    context_bytes: float

    def size(self, load: Load) -> float:
        """Bytes that each of them has in the end."""
        if load.decodes:
            return self.ranks * self.result_bytes * load.tokens
        return load.requests * load.context * self.context_bytes


@dataclass(frozen=True)
class Work:
    """One rank's work in a step: bytes of weights it reads, operations for each token, and the rest. `kept`:
    bytes that it holds and reads little of.
    """

    weights: float = 0.0
    operations: float = 0.0
    experts: ExpertWork | None = None
    cache: CacheWork = CacheWork()
    merge: Merge | None = None
    kept: float = 0.0

    def weight_bytes(self, tokens: float) -> float:
        """Bytes of weights that a step with so many tokens reads."""
        return self.weights + (self.experts.touched(tokens) * self.experts.bytes if self.experts else 0.0)

    def held_bytes(self) -> float:
        """Bytes of weights that the rank holds."""
        return self.weights + self.kept + (self.experts.here * self.experts.bytes if self.experts else 0.0)

    def total_operations(self, tokens: float, load: Load) -> float:
        """Operations of a step with so many tokens."""
        found = self.operations * tokens + self.cache.work(load)
        if self.experts is not None:
            share = self.experts.here / self.experts.count
            found += tokens * self.experts.top_k * share * self.experts.operations
        return found


@dataclass(frozen=True)
class Travel:
    """A mixture's other form: its tokens travel to the ranks of the `top_k` experts that each takes. `own`:
    the work on tokens where they are (router, shared expert); `kept`: bytes of weights that a rank holds for
    this form alone.
    """

    top_k: int
    own: Work
    kept: float = 0.0

    def rows(self, rows: float, ranks: int, load: Load) -> float:
        """Rows that a rank with so many tokens sends: one to each rank that has experts of a token. In a CUDA
        graph, that's one to every rank.
        """
        return rows * (ranks if load.decodes else min(self.top_k, ranks))


@dataclass(frozen=True)
class Op:
    """A step as the compiler sees it.

    takes, gives: features of its whole input and output. element, gives_element: their bytes each. `like`:
    what its name has in common with the same step of other layers. `joined`: its output is of several
    matrices side by side, each in parts, so that nothing but its tokens can move. `travel`: set if its
    tokens may travel to their experts.
    """

    placed: Placed
    takes: int
    gives: int
    work: Work = Work()
    element: int = 2
    gives_element: int = 2
    like: str = ""
    joined: bool = False
    travel: Travel | None = None

    @property
    def name(self) -> str:
        """The step's name."""
        return self.placed.name

    @property
    def kind(self) -> "Op":
        """The same for all steps that differ by nothing but their names."""
        return replace(self, placed=replace(self.placed, name=""), like="")

    def seconds(self, rows: float, parts: tuple[int, int], load: Load, hardware: Hardware) -> float:
        """Time on a rank that has `rows` tokens, of their input and output features one of `parts`."""
        activations = rows * (
            self.takes * self.element / parts[0] + self.gives * self.gives_element / parts[1]
        )
        if self.placed.residual == "add_norm":
            activations *= 2
        size = self.work.weight_bytes(rows) + self.work.cache.size(load) + activations
        found = kernel_seconds(size, self.work.total_operations(rows, load), hardware)
        merge = self.work.merge
        if merge is not None:
            found += collective_seconds("all_gather", merge.ranks, merge.size(load), hardware)
        return found

    def messages(self, rows: float, ranks: int, load: Load) -> tuple[float, float]:
        """Bytes that a rank with `rows` tokens sends to the ranks of their experts, and of what comes back: a
        row out has its experts and their weights with it.
        """
        assert self.travel is not None
        sent = self.travel.rows(rows, ranks, load)
        return sent * (self.takes * self.element + 8 * self.travel.top_k), (
            sent * self.gives * self.gives_element
        )

    def travel_weights(self, rows: float, ranks: int) -> float:
        """Bytes of weights that a rank reads whose tokens travel."""
        assert self.travel is not None
        experts = self.work.experts
        routed = experts.touched(rows * ranks) * experts.bytes if experts else 0.0
        return self.travel.own.weights + routed

    def travel_seconds(self, rows: float, ranks: int, load: Load, hardware: Hardware) -> tuple[float, float]:
        """Time on a rank that has `rows` tokens which travel over `ranks`: on it, and between ranks."""
        assert self.travel is not None
        own, experts = self.travel.own, self.work.experts
        out, back = self.messages(rows, ranks, load)
        between = sum(collective_seconds("all_to_all", ranks, size, hardware) for size in (out, back))
        if not load.decodes:
            between += collective_seconds("all_to_all", ranks, 8.0 * ranks, hardware) + hardware.host
        routed = self.travel_weights(rows, ranks) - own.weights
        operations = 0.0
        if experts is not None:
            share = experts.here / experts.count
            operations = rows * ranks * experts.top_k * share * experts.operations
        beside = own.weights + rows * (self.takes * self.element + self.gives * self.gives_element)
        here = kernel_seconds(routed + out + back, operations, hardware)
        here += kernel_seconds(beside, own.operations * rows, hardware)
        # Rows are gathered ahead of the one exchange and summed behind the other.
        here += kernel_seconds(2 * out, 0.0, hardware) + kernel_seconds(2 * back, 0.0, hardware)
        return here, between
