"""Offline use: the engine loop in this process, text in and text out."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quickturn.config import EngineConfig
from quickturn.engine.core import EngineCore
from quickturn.engine.messages import AddRequest, CancelRequest, TokenLogprobs, TokenOutput
from quickturn.sampling_params import SamplingParams
from quickturn.text.chat_template import ChatTemplate
from quickturn.text.detokenizer import Detokenizer
from quickturn.text.rendering import render_chat
from quickturn.text.tokenizer import Tokenizer, load_tokenizer, pack_tokens

if TYPE_CHECKING:
    from quickturn.engine.leader import Leader

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass
class Completion:
    """One answer. `cached_tokens` of the prompt were not computed again; `finish_reason` is stop, length or
    error.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprobs]


def open_core(config: EngineConfig) -> "EngineCore | Leader":
    """An engine in this process; for several ranks the first of them, which starts the others."""
    if config.world == 1:
        return EngineCore(config)
    from quickturn.engine.leader import Leader

    return Leader(config)


class LLM:
    """A model loaded into this process. Use it as a context manager, or call `close`."""

    def __init__(self, model: str, **options: Any) -> None:
        """Load `model` (hub id, directory, `.gguf`, or 'embedded'); `options` are fields of
        `EngineConfig`. With `tp=2`, say, a second process is started, which ends with this one.
        """
        self.config = EngineConfig(model=model, **options)
        self.tokenizer: Tokenizer = load_tokenizer(model)
        self._core = open_core(self.config)
        self._ids = itertools.count(1)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | None = None
    ) -> list[Completion]:
        """Complete each prompt (text, or token ids), all at once. Raises ValueError for one that can't
        run.
        """
        several: Sequence[Any] = prompts
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            several = [prompts]
        ids = [self.tokenizer.encode(one) if isinstance(one, str) else list(one) for one in several]
        return self._run(ids, sampling or SamplingParams())

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Answer one conversation or several; each is a list of `{"role": ..., "content": ...}` messages."""
        several: Sequence[Any] = conversations
        if conversations and isinstance(conversations[0], dict):
            several = [conversations]
        ids = [self.render(list(one)) for one in several]
        return self._run(ids, sampling or SamplingParams(max_tokens=self._core.ready().max_context))

    def close(self) -> None:
        """Wait for the device and let go of it."""
        self._core.close()

    def __enter__(self) -> "LLM":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def render(self, messages: list[Message]) -> list[int]:
        """Prompt ids of a conversation. Raises ValueError if the model has no chat template."""
        if self.tokenizer.chat_template is None:
            raise ValueError("this model has no chat template; use generate with a prompt of your own")
        template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer.special)
        return render_chat(self.tokenizer, template, messages).ids.tolist()

    def _run(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        running: dict[int, tuple[Completion, Detokenizer]] = {}
        answers = []
        for ids in prompts:
            room = max(1, self._core.ready().max_context - len(ids))
            params = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            id = next(self._ids)
            answer = Completion("", [], "", len(ids), 0, [])
            answers.append(answer)
            running[id] = answer, Detokenizer(self.tokenizer, params)
            self._core.add(AddRequest(id, pack_tokens(ids), params, time.monotonic()))
        try:
            while running:
                for output in self._core.step().outputs:
                    if output.id in running:
                        self._take(output, *running[output.id])
                        if running[output.id][0].finish_reason:
                            del running[output.id]
        finally:
            # Interrupted (Ctrl-C in a notebook): the next call must not go on with these.
            for id in running:
                self._core.cancel(CancelRequest(id))
        failed = [answer.text for answer in answers if answer.finish_reason == "error"]
        if failed:
            raise ValueError(failed[0])
        return answers

    def _take(self, output: TokenOutput, answer: Completion, detokenizer: Detokenizer) -> None:
        if output.finish == "error":
            answer.text, answer.finish_reason = output.error, "error"
            return
        delta = detokenizer.push(output.tokens, output.finish)
        answer.text += delta.text
        answer.tokens += output.tokens[: delta.tokens]
        answer.logprobs += (output.logprobs or [])[: delta.tokens]
        answer.finish_reason = delta.finish
        if output.cached_tokens >= 0:
            answer.cached_tokens = output.cached_tokens
        if delta.stopped_here:
            self._core.cancel(CancelRequest(output.id, finished=True))
