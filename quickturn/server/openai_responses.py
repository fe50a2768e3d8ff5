"""`/v1/responses`: the OpenAI Responses API, with responses that later ones may go on from."""

from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.answering import Turn, begin
from quickturn.server.body import read_body
from quickturn.server.fields import tenant_of
from quickturn.server.openai_objects import new_id
from quickturn.server.replying import answer, json_response
from quickturn.server.responses_body import ResponsesBody, echo, response_turn
from quickturn.server.responses_items import Item, input_items
from quickturn.server.responses_reply import ResponseReply
from quickturn.server.responses_store import StoredResponse
from quickturn.server.state import ServerState
from quickturn.server.streaming import OPENAI

_DECODER = msgspec.json.Decoder(ResponsesBody)


async def responses(request: Request) -> Response:
    """`POST`: answer the input, behind the conversation of `previous_response_id` if there is one."""
    state: ServerState = request.app.state.server
    owner = tenant_of(request)
    body = await read_body(request, _DECODER, state)
    model = state.model_name(body.model)
    before: list[Item] = []
    if body.previous_response_id is not None:
        before = list(state.responses.get(body.previous_response_id, owner, "previous_response_id").items)
    known = {str(item.get("id")): item for item in before if item.get("id") is not None}
    new: list[Item] = []

    def read() -> Turn:
        new.extend(input_items(body.input, known))
        return response_turn(body, [*before, *new])

    answers = await begin(request, state, read)
    id = new_id("resp")

    def keep(response: Item) -> None:
        if body.store is not False:
            output = response["output"]
            size = len(msgspec.json.encode([new, output]))
            stored = StoredResponse(owner, response, new, [*before, *new, *output], size)
            state.responses.put(id, stored)

    fields = echo(body, id, model)
    reply = ResponseReply(state.tokenizer.vocabulary, answers, fields, body.logprobs is not None, keep)
    dialect = replace(OPENAI, error=reply.failed)
    return await answer(request, answers, reply, bool(body.stream), state.limits.keepalive, dialect)


async def stored_response(request: Request) -> Response:
    """`GET` or `DELETE` of `/v1/responses/{id}`."""
    state: ServerState = request.app.state.server
    owner, id = tenant_of(request), request.path_params["id"]
    if request.method == "DELETE":
        state.responses.remove(id, owner)
        return json_response({"id": id, "object": "response", "deleted": True})
    return json_response(state.responses.get(id, owner).response)


async def response_input(request: Request) -> Response:
    """`GET /v1/responses/{id}/input_items`: what the request itself brought."""
    state: ServerState = request.app.state.server
    owner, id = tenant_of(request), request.path_params["id"]
    items = list(state.responses.get(id, owner).input)
    return json_response(
        {"object": "list", "data": items, "has_more": False, "first_id": None, "last_id": None}
    )
