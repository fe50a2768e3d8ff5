"""What was measured of one request, on the client's clock."""

from dataclasses import dataclass, field


@dataclass
class Record:
    """One request. Times are seconds since the run began.

    `arrivals` are the times at which text arrived, one for each read that brought any, and `counts` the
    tokens in each: measured where the server says so or sends one token an event, else shared out by length
    (`exact_counts` is false). `cached` and `prompt` are the server's, None where it gave none; `ceiling` is
    what an infinite cache would have had of the prompt.
    """

    session: str
    turn: int
    sent: float
    asked: int
    done: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    exact_counts: bool = True
    prompt: int | None = None
    cached: int | None = None
    answer: int = 0
    ceiling: int = 0
    finish: str = ""
    error: str = ""
    detail: str = ""
    retry_after: float | None = None

    @property
    def first_token(self) -> float | None:
        """Seconds from sending to the first text."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def rate(self) -> float | None:
        """Tokens a second behind the first arrival; None where all came at once."""
        if len(self.arrivals) < 2 or self.arrivals[-1] <= self.arrivals[0]:
            return None
        return sum(self.counts[1:]) / (self.arrivals[-1] - self.arrivals[0])

    def gaps(self) -> list[float]:
        """Seconds between arrivals, as a reader waits for them."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]
