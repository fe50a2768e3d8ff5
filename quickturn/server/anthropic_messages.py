"""`POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic Messages API."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.answering import begin, render
from quickturn.server.anthropic_reply import DIALECT, MessageReply
from quickturn.server.anthropic_turn import CountBody, MessagesBody, message_turn, prompt_turn
from quickturn.server.body import read_body
from quickturn.server.off_loop import prepare
from quickturn.server.replying import answer, json_response
from quickturn.server.state import ServerState

_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountBody)


async def messages(request: Request) -> Response:
    """Answer a conversation, streamed or whole."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _MESSAGES, state)
    model = state.model_name(body.model)
    answers = await begin(request, state, lambda: message_turn(body))
    reply = MessageReply(answers, model)
    return await answer(request, answers, reply, bool(body.stream), state.limits.keepalive, DIALECT)


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a body has."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _COUNT, state)
    state.model_name(body.model)
    tokens = await prepare(request, lambda: len(render(state, prompt_turn(body)).ids))
    return json_response({"input_tokens": tokens})
