"""The door in front of every `/v1` path: keys, draining, a dead engine, and the count of what is under
way."""

import hashlib
import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quickturn.server.errors import ApiError, unavailable
from quickturn.server.fields import TENANT
from quickturn.server.state import ServerState

_UNKNOWN_PATH = "other"


class Gate:
    """ASGI middleware. Health, metrics and the dashboard's files pass freely; `/v1` and the dashboard's
    state need a key if any is configured.
    """

    def __init__(self, app: ASGIApp, state: ServerState, paths: frozenset[str]) -> None:
        self._app = app
        self._state = state
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through or answer with the reason why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = str(scope["path"])
        status = 499

        async def count_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        guarded = path.startswith("/v1/") or path in ("/tokenize", "/detokenize")
        private = guarded or path == "/dashboard/state"
        self._state.active += guarded
        try:
            if private:
                self._check_key(scope)
            if guarded:
                self._check_service(scope)
            await self._app(scope, receive, count_status)
        except ApiError as error:
            await error.response(path)(scope, receive, count_status)
        except Exception:
            status = 500
            raise
        finally:
            self._state.active -= guarded
            label = path if path in self._paths else _UNKNOWN_PATH
            self._state.metrics.http_requests.labels(label, str(status)).inc()

    def _check_key(self, scope: Scope) -> None:
        """Let a known key through, and leave a name for it: what one key made is not for another."""
        keys = self._state.api_keys
        if not keys:
            return
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        given = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Compare with every key, each in constant time, so that timing says nothing.
        matches = [hmac.compare_digest(given, known.encode()) for known in keys]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
                kind="authentication_error",
                code="invalid_api_key",
            )
        scope[TENANT] = hashlib.blake2b(given, digest_size=16).hexdigest()

    def _check_service(self, scope: Scope) -> None:
        if scope["method"] == "POST" and (trouble := self._state.trouble()) is not None:
            raise unavailable(trouble)
