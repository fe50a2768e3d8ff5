"""Reads and decodes a request's body within bounds."""

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from quickturn.server.errors import ApiError, from_validation
from quickturn.server.off_loop import beside
from quickturn.server.state import ServerState
from quickturn.server.streaming import ClientGone

Body = TypeVar("Body")


async def read_body(request: Request, decoder: "msgspec.json.Decoder[Body]", state: ServerState) -> Body:
    """The body as `decoder`'s type. Raises ApiError: 413 for one that is too large, 408 for one that doesn't
    end, 400 naming the field that is wrong.
    """
    limits = state.limits
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.body:
                    raise ApiError(413, f"the body is larger than {limits.body} bytes", code="body_too_large")
                chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGone from error
    except TimeoutError as error:
        message = f"the body did not end within {limits.body_seconds:g} seconds"
        raise ApiError(408, message, code="body_timeout") from error
    try:
        return await beside(size, lambda: decoder.decode(b"".join(chunks)), state.text_threads)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise from_validation(error) from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body can't be read: {error}", code="invalid_body") from error
