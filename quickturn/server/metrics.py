"""The server's own figures and the engine's, for Prometheus."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_BUCKETS = (0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)

Family = CounterMetricFamily | GaugeMetricFamily


class Metrics:
    """One registry per server, so that two servers in one process don't share figures."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _Values("quickturn_engine_", " of the engine")
        self._promise = _Values("quickturn_")
        self._registry.register(self._engine)
        self._registry.register(self._promise)
        registry = self._registry
        self.http_requests = Counter(
            "quickturn_http_requests",
            "HTTP requests by path and status",
            ("path", "status"),
            registry=registry,
        )
        self.finished = Counter(
            "quickturn_choices_finished", "Answers by the reason of their end", ("reason",), registry=registry
        )
        self.prompt_tokens = Counter("quickturn_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter(
            "quickturn_cached_prompt_tokens",
            "Tokens of prompts that were not computed again",
            registry=registry,
        )
        self.answers = AnswerFigures()
        registry.register(self.answers)
        self.first_token = Histogram(
            "quickturn_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.active = Gauge("quickturn_http_active", "HTTP requests being answered", registry=registry)
        self.up = Gauge("quickturn_engine_up", "1 while the engine process serves", registry=registry)

    def render(
        self, engine: Mapping[str, float], up: bool, active: int, promise: Mapping[str, float]
    ) -> bytes:
        """The page of `/metrics`; `engine` are the engine's own values, by the names that it gives them,
        `promise` what is promised and how it is kept.
        """
        self._engine.values = engine
        self._promise.values = promise
        self.up.set(up)
        self.active.set(active)
        return generate_latest(self._registry)


class AnswerFigures(Collector):
    """Tokens of answers and the time between them. Counted for every token of every stream, hence by hand:
    one `observe` of the library costs as much as the rest of a token's way through this process.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._gaps = [0] * (len(_GAP_BUCKETS) + 1)
        self._seconds = 0.0

    def gap(self, seconds: float) -> None:
        """An output came `seconds` a token after the one before."""
        self._gaps[bisect_left(_GAP_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def gaps(self) -> tuple[int, float]:
        """How many so far, and their seconds together."""
        return sum(self._gaps), self._seconds

    def collect(self) -> Iterable[Metric]:
        """Both, as Prometheus wants them."""
        yield CounterMetricFamily("quickturn_generated_tokens", "Tokens of answers", value=self.tokens)
        bounds = [*map(str, _GAP_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "quickturn_time_between_tokens_seconds",
            "Between one output of an answer and the next, per token",
            buckets=list(zip(bounds, accumulate(self._gaps), strict=True)),
            sum_value=self._seconds,
        )


class _Values(Collector):
    """Shows values by their names behind a prefix; names that end in `_total` are counters."""

    def __init__(self, prefix: str, about: str = "") -> None:
        self.values: Mapping[str, float] = {}
        self._prefix = prefix
        self._about = about

    def collect(self) -> Iterable[Family]:
        for name, value in sorted(self.values.items()):
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"{self._prefix}{name}", f"{name}{self._about}", value=value)
