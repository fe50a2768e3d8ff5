"""The outputs of one request, on the server's side."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from quickturn.engine.messages import TokenOutput


class EngineDied(RuntimeError):
    """The engine process is gone, or never came up; the text is the engine's own message where it left
    one."""


class RequestStream(AsyncIterator[TokenOutput]):
    """The outputs of one request, in order; ends after the one with a `finish`.

    What comes while nobody reads is joined to one output, so that a slow reader costs the memory of its
    tokens and gets fewer, longer outputs. Raises EngineDied when the engine process dies meanwhile.
    """

    def __init__(self, cancel: Callable[[int, bool], None], request_id: int) -> None:
        """`cancel(id, finished)` tells the engine to stop the request."""
        self.id = request_id
        self._cancel = cancel
        self._outputs: deque[TokenOutput] = deque()
        self._waiter: asyncio.Future[None] | None = None
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

    def cancel(self, finished: bool = False) -> None:
        """Tell the engine to stop this request; without effect once it has ended. `finished`: it was a good
        answer."""
        if not self.ended:
            self._end()
            self._cancel(self.id, finished)

    def put(self, output: TokenOutput) -> None:
        """Hand the reader an output."""
        if self._outputs and output.finish in ("", "stop", "length"):
            self._outputs.append(_joined(self._outputs.pop(), output))
        else:
            self._outputs.append(output)
        if output.finish:
            self._end()
        else:
            self._wake()

    def fail(self, message: str) -> None:
        """End with EngineDied."""
        self._failure = message
        self._end()

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
