"""The dashboard's endpoints: its page, its files, and the state that the page asks for once a second."""

import time
from importlib import resources

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from quickturn.engine.journal import Entry
from quickturn.server.replying import json_response
from quickturn.server.state import ServerState
from quickturn.server.status_pages import promise_figures

_STATS_TIMEOUT_S = 0.5
_SHOWN_REQUESTS = 100
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "cache-control": "no-cache",
    # Everything comes from this server, and nobody may frame the page: what a model writes is shown here.
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
}


async def page(request: Request) -> Response:
    """`GET /`: the page itself."""
    return _file("index.html")


async def static_file(request: Request) -> Response:
    """`GET /dashboard/NAME`: its script and style files."""
    return _file(request.path_params["name"])


async def dashboard_state(request: Request) -> Response:
    """`GET /dashboard/state`: the server's condition, the engine's figures and the requests, as one JSON
    object.
    """
    state: ServerState = request.app.state.server
    stats = await state.engine.stats(_STATS_TIMEOUT_S)
    now = time.monotonic()
    journal, ready = state.engine.journal, state.engine.ready
    live = list(journal.live.values())[:_SHOWN_REQUESTS]
    body = {
        "model": state.names[0],
        "trouble": state.trouble(),
        "facts": ready.facts if ready is not None else {},
        "max_context": ready.max_context if ready is not None else 0,
        "stats": stats.values,
        "promise": promise_figures(state),
        "open_requests": len(journal.live),
        "live": [_entry(entry, now) for entry in live],
        "ended": [_entry(entry, now) for entry in journal.ended],
    }
    return json_response(body, headers=_HEADERS)


def _entry(entry: Entry, now: float) -> dict[str, object]:
    """What the page shows of a request; times in seconds, `first_token` null until there is one."""
    return {
        "id": entry.id,
        "phase": entry.phase(),
        "session": entry.session,
        "prompt_tokens": entry.prompt_tokens,
        "cached_tokens": entry.cached_tokens,
        "answer_tokens": entry.answer_tokens,
        "seconds": (entry.ended or now) - entry.submitted,
        "first_token": entry.first - entry.submitted if entry.first else None,
        "tokens_per_second": entry.tokens_per_second(),
    }


def _file(name: str) -> Response:
    """A file of `static/`. Raises a 404 for any other name, whatever it tries to reach."""
    folder = resources.files("quickturn.server.dashboard") / "static"
    known = {entry.name: entry for entry in folder.iterdir() if entry.is_file()}
    if name not in known:
        raise HTTPException(404)
    media_type = _TYPES[name.rpartition(".")[2]]
    return Response(known[name].read_bytes(), media_type=media_type, headers=_HEADERS)
