"""An engine core without a model: each request's `session` is a JSON script that says what its answer will
be.

Keys: `text` (the answer, ended by the end token), `chunk` (tokens per output), `wait` (steps before the first
output), `until` (a file that must be there before the first output), `endless` (never ends by itself),
`refuse` and `raise` (an error text, by output or by exception), `crash` (raise in the step), `cached` (cached
prompt tokens to report), `tell_salt` (answer with the cache salt), `tell_boundaries` (with where prompts may
part), `echo` (with the prompt).
"""

import json
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tiny_text import EOS_ID, encode, spell

from quickturn.config import EngineConfig
from quickturn.engine.messages import (
    AddRequest,
    Admitted,
    CancelRequest,
    CheckConstraint,
    ConstraintChecked,
    EngineReady,
    EngineStats,
    HoldSession,
    LoadProgress,
    PromptScores,
    StepOutput,
    TokenLogprobs,
    TokenOutput,
)

STEP_S = 0.001
DEFAULT_TEXT = "Grüße, 世界 🙂!"


@dataclass
class _Running:
    request: AddRequest
    answer: list[int]
    chunk: int
    wait: int
    until: str
    endless: bool
    crash: bool
    cached: int
    sent: int = 0
    first: bool = True


class FakeCore:
    def __init__(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        if config.served_model_name == "broken":
            raise ValueError("the model's file is not there; choose another --model")
        if config.served_model_name == "vanishes":
            os._exit(7)
        progress(LoadProgress("load", 1, 2))
        progress(LoadProgress("load", 2, 2))
        self._config = config
        self._running: dict[int, _Running] = {}
        self._rejected: list[TokenOutput] = []
        self._checked: list[ConstraintChecked] = []
        self._news: list[PromptScores] = []
        self._counts = {
            "added_total": 0,
            "cancelled_total": 0,
            "stopped_total": 0,
            "finished_total": 0,
            "held_total": 0,
        }
        self._steps = 0

    def ready(self) -> EngineReady:
        return EngineReady(self._config.max_context or 4096, 256, 1 << 20, 64, 300, {"core": "fake"})

    def add(self, request: AddRequest) -> None:
        self._counts["added_total"] += 1
        script = json.loads(request.session[max(request.session.find("{"), 0) :] or "{}")
        if "refuse" in script:
            self._rejected.append(TokenOutput(request.id, [], finish="error", error=script["refuse"]))
            return
        if "raise" in script:
            raise ValueError(script["raise"])
        text = request.cache_salt if script.get("tell_salt") else script.get("text", DEFAULT_TEXT)
        if script.get("tell_boundaries"):
            text = json.dumps(request.boundaries)
        answer = [*encode(text), EOS_ID]
        if script.get("echo"):
            prompt = array("i")
            prompt.frombytes(request.tokens)
            answer = [*spell(prompt.tolist()).encode(), EOS_ID]
        if request.sampling.prompt_logprobs is not None:
            self._news += _scores(request, request.sampling.prompt_logprobs)
        self._running[request.id] = _Running(
            request,
            answer,
            script.get("chunk", 1),
            script.get("wait", 0),
            script.get("until", ""),
            script.get("endless", False),
            script.get("crash", False),
            script.get("cached", 0),
        )

    def cancel(self, request: CancelRequest) -> None:
        if self._running.pop(request.id, None) is not None:
            self._counts["stopped_total" if request.finished else "cancelled_total"] += 1

    def hold(self, request: HoldSession) -> None:
        self._counts["held_total"] += 1

    def check(self, request: CheckConstraint) -> None:
        error = "the grammar is too odd" if "odd" in request.constraint.source else ""
        self._checked.append(ConstraintChecked(request.id, error))

    def checked(self) -> list[ConstraintChecked]:
        checked, self._checked = self._checked, []
        return checked

    def announce(self, tell: Callable[[Admitted], None]) -> None:
        self.tell = tell

    def news(self) -> list[PromptScores]:
        news, self._news = self._news, []
        return news

    def has_work(self) -> bool:
        return bool(self._running or self._rejected)

    def step(self) -> StepOutput:
        time.sleep(STEP_S)
        self._steps += 1
        outputs, self._rejected = self._rejected, []
        for request_id, running in list(self._running.items()):
            if running.crash:
                raise RuntimeError("scripted crash")
            if running.wait > 0:
                running.wait -= 1
                continue
            if running.until and not os.path.exists(running.until):
                continue
            outputs.append(self._advance(request_id, running))
        return StepOutput(outputs)

    def stats(self) -> EngineStats:
        values = {name: float(value) for name, value in self._counts.items()}
        return EngineStats(
            {**values, "running": float(len(self._running)), "steps_total": float(self._steps)}
        )

    def close(self) -> None:
        self._running.clear()

    def _advance(self, request_id: int, running: _Running) -> TokenOutput:
        sampling = running.request.sampling
        if running.endless:
            tokens = [
                running.answer[(running.sent + i) % (len(running.answer) - 1)] for i in range(running.chunk)
            ]
        else:
            tokens = running.answer[running.sent : running.sent + running.chunk]
        tokens = tokens[: sampling.max_tokens - running.sent]
        running.sent += len(tokens)
        finish = ""
        if tokens[-1] in sampling.stop_token_ids:
            finish = "stop"
        elif running.sent >= sampling.max_tokens:
            finish = "length"
        cached = running.cached if running.first else -1
        running.first = False
        if finish:
            del self._running[request_id]
            self._counts["finished_total"] += 1
        logprobs = None
        if sampling.logprobs is not None:
            top = [(0, -0.25 - index) for index in range(sampling.logprobs)]
            logprobs = [TokenLogprobs(-0.25, top) for _ in tokens]
        return TokenOutput(request_id, tokens, finish, cached, logprobs)


def _scores(request: AddRequest, top: int) -> list[PromptScores]:
    """Every token of the prompt but the first is as likely as any other."""
    count = len(request.tokens) // 4 - 1
    if count < 1:
        return []
    tops = array("i", range(top)).tobytes() * count, array("f", [-0.5] * top * count).tobytes()
    return [
        PromptScores(
            request.id, 1, array("f", [-0.5] * count).tobytes(), array("i", [1] * count).tobytes(), *tops
        )
    ]
