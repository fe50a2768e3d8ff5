"""The HTTP application: which path goes where, and how errors leave."""

import logging
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quickturn.server.anthropic_messages import count_tokens, messages
from quickturn.server.dashboard import dashboard_state, page, static_file
from quickturn.server.errors import ApiError
from quickturn.server.gate import Gate
from quickturn.server.openai_chat import chat_completions
from quickturn.server.openai_completions import completions
from quickturn.server.openai_responses import response_input, responses, stored_response
from quickturn.server.openapi import openapi
from quickturn.server.state import ServerState
from quickturn.server.status_pages import health, live, metrics, models
from quickturn.server.streaming import ClientGone
from quickturn.server.tokens import detokenize, tokenize

log = logging.getLogger("quickturn.server")

ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/responses/{id}", stored_response, methods=["GET", "DELETE"]),
    Route("/v1/responses/{id}/input_items", response_input, methods=["GET"]),
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model:path}", models, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/health/live", live, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/", page, methods=["GET"]),
    Route("/dashboard/state", dashboard_state, methods=["GET"]),
    Route("/dashboard/{name}", static_file, methods=["GET"]),
]


def build_app(state: ServerState, cors_origins: Sequence[str] = ()) -> Starlette:
    """The application over one engine. Its endpoints find `state` as `app.state.server`. Pages of
    `cors_origins` may call it from a browser.
    """
    cors = Middleware(CORSMiddleware, allow_origins=cors_origins, allow_methods=["*"], allow_headers=["*"])
    gate = Middleware(Gate, state=state, paths=frozenset(route.path for route in ROUTES))
    app = Starlette(
        routes=ROUTES,
        middleware=[cors, gate] if cors_origins else [gate],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_exception,
            ClientGone: _client_gone,
            RecursionError: _too_deep,
            Exception: _unexpected,
        },
    )
    app.state.server = state
    return app


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"there is no path {request.url.path}", 405: f"{request.method} is not allowed here"}
    return ApiError(error.status_code, message.get(error.status_code, error.detail)).response(
        request.url.path
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _too_deep(request: Request, error: Exception) -> Response:
    """What a body nests, templates and schemas are walked through level by level."""
    message = "the body is nested too deeply: flatten the objects and lists in it"
    return ApiError(400, message, code="too_deep").response(request.url.path)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(500, "internal error; the server's log has the details", kind="server_error").response(
        request.url.path
    )
