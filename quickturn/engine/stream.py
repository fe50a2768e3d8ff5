"""The outputs of one request, on the server's side."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from quickturn.engine.messages import PromptScores, TokenOutput


class EngineDied(RuntimeError):
    """The engine process is gone, or never came up; the text is the engine's own message where it left
    one."""


class RequestStream(AsyncIterator[TokenOutput]):
    """The outputs of one request, in order; the one with a `finish` is the last.

    Iterate over them, or have them handed over by `listen`. What comes while nobody reads is joined to one
    output, so that a slow reader costs the memory of its tokens and gets fewer, longer outputs. The iterator
    raises EngineDied when the engine process dies meanwhile.
    """

    def __init__(self, cancel: Callable[[int, bool], None], request_id: int) -> None:
        """`cancel(id, finished)` tells the engine to stop the request."""
        self.id = request_id
        self._cancel = cancel
        self._outputs: deque[TokenOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[TokenOutput], None] | None = None
        self._on_failure: Callable[[EngineDied], None] | None = None
        self._held = False
        self._scores: list[PromptScores] = []
        self._take_scores: Callable[[PromptScores], None] | None = None
        self._admitted = False
        self._failure: str | None = None
        self.ended = False
        """Nothing more comes: the request finished, failed, or was cancelled from this side."""

    async def __anext__(self) -> TokenOutput:
        """The next output, waiting for it if need be."""
        while not self._outputs:
            if self._failure is not None:
                raise EngineDied(self._failure)
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._outputs.popleft()

    async def begun(self) -> None:
        """Return when the request runs, or when there is something of its answer, its end at least."""
        while not (self._admitted or self._outputs or self.ended):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def listen(
        self,
        take: Callable[[TokenOutput], None],
        on_failure: Callable[[EngineDied], None],
        take_scores: Callable[[PromptScores], None] = lambda _: None,
    ) -> None:
        """Call `take` with every output in the turn of the event loop that brings it, which spares a task's
        wake a token; it must not raise. `on_failure` is called when the engine dies before the last one,
        `take_scores` with the scores of the prompt, all of them before the first token.
        """
        self._take, self._on_failure, self._take_scores = take, on_failure, take_scores
        self.release()

    def hold(self) -> None:
        """Keep what comes, joined, until `release`: the listener can't get rid of more."""
        self._held = True

    def release(self) -> None:
        """Hand over what was kept, and go on."""
        self._held = False
        self._hand_scores()
        while self._outputs and self._take is not None and not self._held:
            self._take(self._outputs.popleft())
        if self._failure is not None and not self._outputs and self._on_failure is not None:
            self._on_failure(EngineDied(self._failure))

    def cancel(self, finished: bool = False) -> None:
        """Tell the engine to stop this request; without effect once it has ended. `finished`: it was a good
        answer."""
        if not self.ended:
            self._end()
            self._cancel(self.id, finished)

    def admit(self) -> None:
        """The request runs."""
        self._admitted = True
        self._wake()

    def put_scores(self, scores: PromptScores) -> None:
        """Hand the listener a part of the prompt's scores."""
        self._scores.append(scores)
        self._hand_scores()

    def _hand_scores(self) -> None:
        while self._scores and self._take_scores is not None and not self._held:
            self._take_scores(self._scores.pop(0))

    def put(self, output: TokenOutput) -> None:
        """Hand the reader an output."""
        if output.finish:
            self.ended = True
        if self._take is not None and not self._held:
            self._take(output)
            return
        if self._outputs and output.finish in ("", "stop", "length"):
            self._outputs.append(_joined(self._outputs.pop(), output))
        else:
            self._outputs.append(output)
        self._wake()

    def fail(self, message: str) -> None:
        """End with EngineDied."""
        self._failure = message
        self._end()
        if not self._held:
            self.release()

    def _end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _joined(earlier: TokenOutput, later: TokenOutput) -> TokenOutput:
    """Two outputs of one request as one; takes the lists of `earlier` over."""
    earlier.tokens.extend(later.tokens)
    logprobs = earlier.logprobs
    if logprobs is None:
        logprobs = later.logprobs
    else:
        logprobs.extend(later.logprobs or ())
    cached = max(earlier.cached_tokens, later.cached_tokens)
    return TokenOutput(later.id, earlier.tokens, later.finish, cached, logprobs, later.error)
