"""`POST /tokenize` and `/detokenize`: the served model's tokens, as other servers show theirs."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.answering import Turn, render
from quickturn.server.body import read_body
from quickturn.server.errors import invalid
from quickturn.server.fields import CommonFields, checked_ids
from quickturn.server.off_loop import prepare
from quickturn.server.openai_tools import read_tools
from quickturn.server.replying import json_response
from quickturn.server.state import ServerState


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Either `prompt` or `messages`. `add_special_tokens` holds for a prompt; a chat's are its template's."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids to turn into text, control tokens included."""

    tokens: list[Any]
    model: str | None = None


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of a chat as it would be sent to the model."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _TOKENIZE, state)
    state.model_name(body.model)
    tokens = await prepare(request, lambda: _tokens(state, body))
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": state.max_context, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [state.tokenizer.vocabulary.token_text(token) for token in tokens]
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state: ServerState = request.app.state.server
    body = await read_body(request, _DETOKENIZE, state)
    state.model_name(body.model)
    ids = checked_ids(body.tokens, "tokens", state.vocab_size)
    text = await prepare(request, lambda: state.tokenizer.decode(ids, skip_special=False))
    return json_response({"prompt": text})


def _tokens(state: ServerState, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.prompt is not None:
        return state.tokenizer.encode(body.prompt, body.add_special_tokens)
    template = body.chat_template_kwargs or {}
    turn = Turn(body.messages or [], CommonFields(), tools=read_tools(body.tools), template=template)
    return render(state, turn).ids.tolist()
