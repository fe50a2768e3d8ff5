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
    page = state.metrics.render(stats.values, state.engine.failure is None, state.active)
    return Response(page, headers={"content-type": CONTENT_TYPE})


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
