"""An engine that answers token ids with token ids, and says how sure it was."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest, CancelRequest, PromptScores, TokenLogprobs
from quickturn.engine.prompt_scores import ScoredPrompt
from quickturn.sampling_params import SamplingParams


@dataclass
class Answer:
    """What came of one prompt. `logprobs` are of the answer's tokens, `scored` of the prompt's from its
    second on, where they were asked for.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scored: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    finish: str = ""
    error: str = ""


class Engine:
    """One engine in this process; a context manager that lets go of the device."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and allocate."""
        self.core = EngineCore(config)
        self._next_id = 0

    def ask(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
        """The answers to prompts that are all added at once. Raises RuntimeError for one that ends in an
        error.
        """
        return self.ask_each([(prompt, sampling) for prompt in prompts])

    def ask_each(self, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Answer]:
        """The same for prompts that are sampled each in its own way."""
        answers: dict[int, Answer] = {}
        for prompt, sampling in requests:
            self._next_id += 1
            answers[self._next_id] = Answer()
            tokens = np.array(prompt, dtype=np.int32).tobytes()
            self.core.add(AddRequest(self._next_id, tokens, sampling, time.monotonic()))
        try:
            while self.core.has_work():
                self._step(answers)
        except BaseException:
            for id, answer in answers.items():
                if not answer.finish:
                    self.core.cancel(CancelRequest(id))
            raise
        for answer in answers.values():
            if answer.error:
                raise RuntimeError(answer.error)
        return list(answers.values())

    def steps(self) -> Mapping[str, int]:
        """How many steps took which path, since the start."""
        values = self.core.stats().values
        return {
            name.removeprefix("steps_"): int(value)
            for name, value in values.items()
            if name.startswith("steps_")
        }

    def close(self) -> None:
        """Wait for the device and let go of it."""
        self.core.close()

    def __enter__(self) -> "Engine":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def _step(self, answers: Mapping[int, Answer]) -> None:
        for output in self.core.step().outputs:
            answer = answers[output.id]
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs or []
            answer.cached_tokens = max(answer.cached_tokens, output.cached_tokens)
            answer.finish, answer.error = output.finish or answer.finish, output.error or answer.error
        for news in self.core.news():
            if isinstance(news, PromptScores):
                answers[news.id].scored += ScoredPrompt().add(news)
