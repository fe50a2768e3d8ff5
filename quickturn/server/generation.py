"""One or several answers to one HTTP request: submitted together, read as text, cancelled together."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from quickturn.engine.messages import TokenLogprobs, TokenOutput
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


@dataclass(frozen=True)
class Piece(Generic[Content]):
    """News of one choice: its new content (text or events), the tokens, their log probabilities, and the
    reason of the end ('' before it).
    """

    index: int
    content: Content
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish: str


@dataclass
class Usage:
    """Token counts of one HTTP request, for its `usage` object. `cached`: prompt tokens that were not
    computed again."""

    prompt: int
    completion: int = 0
    cached: int = 0


@dataclass
class Generation(Generic[Content]):
    """All choices of one HTTP request, each read by its own `reader`. Iterate `pieces` to the end, or call
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

    async def pieces(self) -> AsyncGenerator[Piece[Content], None]:
        """The news of all choices as they come. Raises ApiError when the engine refuses or dies; cancels what
        is left when closed."""
        try:
            if len(self._streams) == 1:
                async for piece in self._choice(0):
                    yield piece
            else:
                async for piece in self._merged():
                    yield piece
        except EngineDied as error:
            raise unavailable(str(error)) from error
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop every choice that still runs; the engine frees what they hold within a step."""
        for stream in self._streams:
            if not stream.ended:
                self.state.metrics.finished.labels("aborted").inc()
                stream.cancel()

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

    async def _choice(self, index: int) -> AsyncGenerator[Piece[Content], None]:
        stream, reader = self._streams[index], self._readers[index]
        last = 0.0
        async for output in stream:
            if output.finish in ("error", "cancelled", "timeout"):
                raise _ended_badly(output)
            self._count_cached(index, output)
            last = self._observe(last, len(output.tokens))
            news = reader.push(output.tokens, output.finish)
            if news.stopped_here:
                stream.cancel(finished=True)
            self.usage.completion += news.tokens
            self.state.metrics.answers.tokens += news.tokens
            if news.finish:
                self.state.metrics.finished.labels(news.finish).inc()
            if news.finish == "tool_calls" and self.routing.session:
                self.state.engine.hold(self.routing.session, TOOL_HOLD_S)
            yield Piece(
                index=index,
                content=news.content,
                tokens=output.tokens[: news.tokens],
                logprobs=(output.logprobs or ())[: news.tokens],
                finish=news.finish,
            )
            if news.finish:
                return

    async def _merged(self) -> AsyncGenerator[Piece[Content], None]:
        # Bounded: while nobody reads, outputs wait (and are joined) in the streams.
        queue: asyncio.Queue[Piece[Content] | BaseException | None] = asyncio.Queue(len(self._streams))

        async def pump(index: int) -> None:
            try:
                async for piece in self._choice(index):
                    await queue.put(piece)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self._streams))]
        try:
            running = len(tasks)
            while running:
                came = await queue.get()
                if came is None:
                    running -= 1
                elif isinstance(came, BaseException):
                    raise came
                else:
                    yield came
        finally:
            for task in tasks:
                task.cancel()

    def _count_cached(self, index: int, output: TokenOutput) -> None:
        """Of several choices over one prompt the first to report counts: the others' hits are on its own
        work."""
        if output.cached_tokens < 0:
            return
        number = index * len(self.prompts) // len(self._streams)
        if number not in self._cached:
            self._cached[number] = output.cached_tokens
            self.usage.cached += output.cached_tokens
            self.state.metrics.cached_tokens.inc(output.cached_tokens)

    def _observe(self, last: float, tokens: int) -> float:
        now = time.monotonic()
        if not last:
            self.state.metrics.first_token.observe(now - self._arrival)
        elif tokens:
            self.state.metrics.answers.gap((now - last) / tokens)
        return now


def _ended_badly(output: TokenOutput) -> ApiError:
    if output.finish == "error":
        return ApiError(400, output.error or "the engine refused the request", code="request_refused")
    reasons = {"timeout": "the request's deadline passed", "cancelled": "the engine cancelled the request"}
    return ApiError(500, reasons[output.finish], kind="server_error", code=output.finish)
