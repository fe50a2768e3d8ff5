"""Many requests from some users, each of whom sends the next one when an answer is complete (a closed loop).

Rates count the time from the first request to the end of the last answer. A user's rate is that of one answer
behind its first token, so that waiting and prefill don't count in it; they count in the time to the first
token.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quickturn.bench.offline import OfflineBench, Spread, spread


@dataclass(frozen=True)
class Load:
    """What is asked: each of `users` sends `turns` requests, prompt and answer lengths drawn between two
    bounds; the first `shared` tokens of all prompts are the same.
    """

    users: int
    turns: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    shared: int = 0

    def __post_init__(self) -> None:
        """Refuse loads that can't be made."""
        if self.users < 1 or self.turns < 1:
            raise ValueError(f"users and turns must be at least 1, got {self.users} and {self.turns}")
        for name in ("prompt", "answer"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"{name} must be a length or a range of lengths, got {low}-{high}")
        if not 0 <= self.shared < self.prompt[0]:
            raise ValueError(f"shared must be less than the shortest prompt, {self.prompt[0]} tokens")


@dataclass(frozen=True)
class Ask:
    """One request: prompt ids, int32, and how many tokens to answer."""

    prompt: NDArray[np.int32]
    answer: int


@dataclass
class Turn:
    """When one request was sent and its tokens came, in seconds."""

    ask: Ask
    sent: float
    tokens: list[float] = field(default_factory=list)
    cached: int = 0


@dataclass(frozen=True)
class Throughput:
    """Tokens a second in and out of all users together; by request, tokens a second of its answer and
    milliseconds to its first token (each as median, least and most, with the slowest tenth's border beside).
    """

    requests: int
    users: int
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    seconds: float
    prompt_tokens_per_second: float
    answer_tokens_per_second: float
    user_tokens_per_second: Spread
    user_tokens_per_second_p10: float
    first_token_ms: Spread
    first_token_ms_p90: float

    def line(self) -> str:
        """The figures for a terminal."""
        return (
            f"{self.requests} requests of {self.users} users in {self.seconds:.1f} s:"
            f" {self.prompt_tokens_per_second:.0f} tokens/s in, {self.answer_tokens_per_second:.0f} tokens/s"
            f" out; each user {self.user_tokens_per_second.median:.1f} tokens/s (slowest tenth under"
            f" {self.user_tokens_per_second_p10:.1f}), first token after {self.first_token_ms.median:.0f} ms"
            f" (slowest tenth over {self.first_token_ms_p90:.0f}), {self.cached_tokens} prompt tokens cached"
        )


def draw(load: Load, vocab_size: int) -> list[Ask]:
    """Random requests, always the same for the same load."""
    rng = np.random.default_rng((load.users, load.turns))
    shared = rng.integers(0, vocab_size, load.shared, dtype=np.int32)

    def one() -> Ask:
        length, answer = (int(rng.integers(low, high + 1)) for low, high in (load.prompt, load.answer))
        rest = rng.integers(0, vocab_size, length - load.shared, dtype=np.int32)
        return Ask(np.concatenate((shared, rest)), answer)

    return [one() for _ in range(load.users * load.turns)]


def summary(turns: list[Turn], users: int) -> Throughput:
    """The figures of a run in which every request was answered."""
    seconds = max(turn.tokens[-1] for turn in turns) - min(turn.sent for turn in turns)
    prompts = sum(len(turn.ask.prompt) for turn in turns)
    answers = sum(len(turn.tokens) for turn in turns)
    rates = [
        (len(turn.tokens) - 1) / max(turn.tokens[-1] - turn.tokens[0], 1e-9)
        for turn in turns
        if len(turn.tokens) > 1
    ] or [0.0]
    firsts = [(turn.tokens[0] - turn.sent) * 1e3 for turn in turns]
    return Throughput(
        len(turns),
        users,
        prompts,
        answers,
        sum(turn.cached for turn in turns),
        seconds,
        prompts / seconds,
        answers / seconds,
        spread(rates),
        float(np.quantile(rates, 0.1)),
        spread(firsts),
        float(np.quantile(firsts, 0.9)),
    )


def measure(
    bench: OfflineBench, asks: list[Ask], users: int, progress: Callable[[int, int], None]
) -> Throughput:
    """Run the requests on the engine, `users` at a time; `progress(answers done, of all)`. Raises ValueError
    for one that the engine refuses.
    """
    core = bench.core
    waiting = iter(asks)
    running: dict[int, Turn] = {}
    turns: list[Turn] = []

    def send() -> None:
        ask = next(waiting, None)
        if ask is not None:
            turn = Turn(ask, time.perf_counter())
            running[bench.ask(ask.prompt, ask.answer)] = turn
            turns.append(turn)

    for _ in range(users):
        send()
    done = 0
    while running:
        outputs = core.step().outputs
        now = time.perf_counter()
        for output in outputs:
            turn = running[output.id]
            turn.tokens += [now] * len(output.tokens)
            turn.cached = max(turn.cached, output.cached_tokens)
            if output.finish in ("error", "cancelled", "timeout"):
                raise ValueError(output.error or f"a request ended with {output.finish}")
            if output.finish:
                done += 1
                del running[output.id]
                send()
                progress(done, len(asks))
    return summary(turns, users)
