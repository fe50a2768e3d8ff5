"""The way from a request to its answer that every generating endpoint takes."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.generation import Generation, Piece
from quickturn.server.streaming import OPENAI, Events, EventStream, StreamDialect, unless_gone

Content = TypeVar("Content")


class Reply(Events[Piece[Content]], Protocol[Content]):
    """The answers of one generation in an API's own objects, in one of the two ways."""

    def more(self, piece: Piece[Content]) -> bytes:
        """The server-sent events of a streamed answer's piece."""

    async def whole(self) -> bytes:
        """The JSON of an answer that isn't streamed."""


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`value` as a JSON body."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


async def answer(
    request: Request,
    generation: Generation[Content],
    reply: Reply[Content],
    stream: bool,
    keepalive: float,
    dialect: StreamDialect = OPENAI,
) -> Response:
    """The response, streamed or whole, once the generation has a place; it is cancelled when the client goes
    away. Raises ClientGone, and ApiError 429 for one that would wait too long.
    """
    room = generation.state.room
    if not room.open:
        await unless_gone(request, room.enter(generation))
    if stream:
        return EventStream(generation, reply, keepalive, dialect)
    try:
        return Response(await unless_gone(request, reply.whole()), media_type="application/json")
    finally:
        generation.cancel()
