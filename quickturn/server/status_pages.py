"""`/health`, `/health/live`, `/metrics` and `/v1/models`: what there is, and how it is."""

from starlette.requests import Request
from starlette.responses import Response

from quickturn.server.metrics import CONTENT_TYPE
from quickturn.server.replying import json_response
from quickturn.server.state import ServerState


async def health(request: Request) -> Response:
    """Readiness: 200 while new requests are taken, else 503 with the reason."""
    state: ServerState = request.app.state.server
    return _condition(state.trouble())


async def live(request: Request) -> Response:
    """Liveness: 503 when the engine is dead or stuck; a server that drains is still alive."""
    state: ServerState = request.app.state.server
    trouble = state.trouble()
    return _condition(None if state.draining and state.engine.failure is None else trouble)


async def metrics(request: Request) -> Response:
    """Prometheus figures of the server and, as fresh as it answers, of the engine."""
    state: ServerState = request.app.state.server
    stats = await state.engine.stats()
    up = state.engine.failure is None
    page = state.metrics.render(stats.values, up, state.active, promise_figures(state))
    return Response(page, headers={"content-type": CONTENT_TYPE})


def promise_figures(state: ServerState) -> dict[str, float]:
    """What is promised, what users get, who waits, and who was turned away."""
    room = state.room
    return {
        "promised_tokens_per_second": room.promise.min_tps_per_user,
        "promised_first_token_seconds": room.promise.max_ttft,
        "user_tokens_per_second": state.pace.tokens_per_second(),
        "queue_waiting": room.waiting,
        "queue_refused_total": room.refused,
        "queue_retry_after_seconds": room.retry_after() if room.waiting else 0,
    }


async def models(request: Request) -> Response:
    """The served model under each of its names, or the one that the path names."""
    state: ServerState = request.app.state.server
    asked = request.path_params.get("model")
    if asked is not None:
        return json_response(_model(state, state.model_name(asked)))
    return json_response({"object": "list", "data": [_model(state, name) for name in state.names]})


def _model(state: ServerState, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quickturn",
        "max_model_len": state.max_context,
    }


def _condition(trouble: str | None) -> Response:
    if trouble is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "message": trouble}, 503)
