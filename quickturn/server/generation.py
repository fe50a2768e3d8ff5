"""One or several answers to one HTTP request: submitted together, read as text, cancelled together."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import msgspec

from quickturn.engine.messages import PromptScores, TokenLogprobs, TokenOutput
from quickturn.engine.stream import EngineDied, RequestStream
from quickturn.sampling_params import SamplingParams
from quickturn.server.errors import ApiError, unavailable
from quickturn.server.state import ServerState
from quickturn.text.tokenizer import pack_tokens

Content = TypeVar("Content")
ContentOut = TypeVar("ContentOut", covariant=True)

TOOL_HOLD_S = 120.0
"""Seconds for which a session that waits for a tool keeps its cache warm."""


class News(Protocol[ContentOut]):
    """What a reader makes of new tokens; `tokens` is how many of them count."""

    @property
    def content(self) -> ContentOut:
        """What the endpoint writes to the client."""

    @property
    def tokens(self) -> int:
        """How many of the pushed tokens belong to the answer."""

    @property
    def finish(self) -> str:
        """Why the answer ended; '' while it runs."""

    @property
    def stopped_here(self) -> bool:
        """Whether the engine still has to be told of the end."""


class Reader(Protocol[ContentOut]):
    """Reads one answer: a `Detokenizer` (text) or an `AnswerReader` (events)."""

    def push(self, tokens: Sequence[int], finish: str = "") -> News[ContentOut]:
        """News of the next tokens, the last ones if there is a `finish`."""


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt, and the sampling of each of its choices. `boundaries`: positions where other
    prompts are likely to part from this one.
    """

    tokens: Sequence[int]
    sampling: Sequence[SamplingParams]
    boundaries: tuple[int, ...] = ()


@dataclass(frozen=True)
class Routing:
    """What the engine's scheduler and cache are told about a request beside its tokens. `retention`:
    seconds for which its cache is worth keeping once it is over.
    """

    session: str = ""
    cache_salt: str = ""
    priority: int = 0
    retention: float = 0.0


class Piece(msgspec.Struct, Generic[Content], frozen=True):
    """News of one choice: its new content (text or events), the tokens, their log probabilities, and the
    reason of the end ('' before it). `scores`: a part of the prompt's, before all of these.
    """

    index: int
    content: Content
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish: str
    scores: PromptScores | None = None


@dataclass
class Usage:
    """Token counts of one HTTP request, for its `usage` object. `cached`: prompt tokens that were not
    computed again."""

    prompt: int
    completion: int = 0
    cached: int = 0


@dataclass
class Generation(Generic[Content]):
    """All choices of one HTTP request, each read by its own `reader`. `run` it to the end, or call
    `cancel`.
    """

    state: ServerState
    prompts: Sequence[Prompt]
    reader: Callable[[SamplingParams], Reader[Content]]
    routing: Routing = field(default_factory=Routing)

    def __post_init__(self) -> None:
        """Submit every choice to the engine. Raises ApiError 503 when there is none."""
        self.usage = Usage(prompt=sum(len(prompt.tokens) for prompt in self.prompts))
        self._arrival = time.monotonic()
        self._streams: list[RequestStream] = []
        self._readers: list[Reader[Content]] = []
        self._cached: dict[int, int] = {}
        for prompt in self.prompts:
            packed = pack_tokens(prompt.tokens)
            for sampling in prompt.sampling:
                self._submit(prompt, packed, sampling)
        self.state.metrics.prompt_tokens.inc(self.usage.prompt)

    @property
    def choices(self) -> int:
        """How many answers there will be; choice i belongs to prompt i // (choices per prompt)."""
        return len(self._streams)

    async def run(self, sink: Callable[[Piece[Content]], None]) -> None:
        """Give `sink` the news of all choices, each as its tokens come from the engine: no task has to be
        woken for them. Returns behind the last; cancels what is left when it is ended before.

        Raises what `sink` raises, and ApiError when the engine refuses or dies.
        """
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running = len(self._streams)

        def end(error: Exception | None) -> None:
            nonlocal running
            running -= 1
            if over.done():
                return
            if error is not None:
                over.set_exception(error)
            elif not running:
                over.set_result(None)

        try:
            for index, (stream, reader) in enumerate(zip(self._streams, self._readers, strict=True)):
                choice = _Choice(self, index, stream, reader, sink, end)
                stream.listen(choice.take, choice.end, choice.take_scores)
            await over
        except EngineDied as error:
            raise unavailable(str(error)) from error
        finally:
            self.cancel()

    async def begun(self) -> None:
        """Return when a choice runs, or has ended."""
        if len(self._streams) == 1:
            await self._streams[0].begun()
            return
        waits = [asyncio.ensure_future(stream.begun()) for stream in self._streams]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def hold(self) -> None:
        """The client reads slower than its answers come: keep them (joined) until `release`."""
        for stream in self._streams:
            stream.hold()

    def release(self) -> None:
        """The client has room again."""
        for stream in self._streams:
            stream.release()

    def cancel(self) -> None:
        """Stop every choice that still runs; the engine frees what they hold within a step."""
        for stream in self._streams:
            if not stream.ended:
                self.state.metrics.finished.labels("aborted").inc()
                stream.cancel()

    def count_cached(self, index: int, tokens: int) -> None:
        """Choice `index` reports cached prompt tokens. Of several choices over one prompt the first to report
        counts: the others' hits are on its own work.
        """
        number = index * len(self.prompts) // len(self._streams)
        if number not in self._cached:
            self._cached[number] = tokens
            self.usage.cached += tokens
            self.state.metrics.cached_tokens.inc(tokens)

    def count_gap(self, last: float, tokens: int) -> float:
        """`tokens` of a choice came, the ones before at `last` (0: these are its first); returns the time."""
        now = time.monotonic()
        if not last:
            self.state.metrics.first_token.observe(now - self._arrival)
        elif tokens:
            self.state.metrics.answers.gap((now - last) / tokens)
        return now

    def _submit(self, prompt: Prompt, packed: bytes, sampling: SamplingParams) -> None:
        # Made first: what can fail must not leave a request behind that nobody reads.
        reader = self.reader(sampling)
        try:
            stream = self.state.engine.submit(
                packed,
                sampling,
                priority=self.routing.priority,
                session=self.routing.session,
                cache_salt=self.routing.cache_salt,
                retention=self.routing.retention,
                boundaries=prompt.boundaries,
            )
        except EngineDied as error:
            raise unavailable(str(error)) from error
        self._streams.append(stream)
        self._readers.append(reader)


class _Choice(Generic[Content]):
    """One choice that is being read. `end` is called once: with None behind its last piece, or with what went
    wrong.
    """

    def __init__(
        self,
        generation: Generation[Content],
        index: int,
        stream: RequestStream,
        reader: Reader[Content],
        sink: Callable[[Piece[Content]], None],
        end: Callable[[Exception | None], None],
    ) -> None:
        self._generation = generation
        self._index = index
        self._stream = stream
        self._reader = reader
        self._sink = sink
        self._on_end = end
        self._last = 0.0
        self._ended = False

    def end(self, error: Exception | None) -> None:
        """Nothing more is read."""
        if not self._ended:
            self._ended = True
            self._on_end(error)

    def take_scores(self, scores: PromptScores) -> None:
        """Pass scores of the prompt on, as `take` does outputs."""
        if self._ended:
            return
        try:
            self._sink(Piece(self._index, self._reader.push(()).content, (), (), "", scores))
        except Exception as error:
            self.end(error)

    def take(self, output: TokenOutput) -> None:
        """Read an output. What goes wrong ends this request, and not the loop that brings everybody's."""
        if self._ended:
            return
        try:
            self._read(output)
        except Exception as error:
            self.end(error)

    def _read(self, output: TokenOutput) -> None:
        generation, tokens = self._generation, output.tokens
        if output.finish in ("error", "cancelled", "timeout"):
            raise _ended_badly(output)
        if output.cached_tokens >= 0:
            generation.count_cached(self._index, output.cached_tokens)
        self._last = generation.count_gap(self._last, len(tokens))
        news = self._reader.push(tokens, output.finish)
        if news.stopped_here:
            self._stream.cancel(finished=True)
        count = news.tokens
        generation.usage.completion += count
        state = generation.state
        state.metrics.answers.tokens += count
        if count < len(tokens):
            tokens = tokens[:count]
        logprobs = output.logprobs[:count] if output.logprobs else ()
        if news.finish:
            state.metrics.finished.labels(news.finish).inc()
            if news.finish == "tool_calls" and generation.routing.session:
                state.engine.hold(generation.routing.session, TOOL_HOLD_S)
        self._sink(Piece(self._index, news.content, tokens, logprobs, news.finish))
        if news.finish:
            self.end(None)


def _ended_badly(output: TokenOutput) -> ApiError:
    if output.finish == "error":
        return ApiError(400, output.error or "the engine refused the request", code="request_refused")
    reasons = {"timeout": "the request's deadline passed", "cancelled": "the engine cancelled the request"}
    return ApiError(500, reasons[output.finish], kind="server_error", code=output.finish)
