"""Errors as the APIs shape them, with a message that says what to change."""

import re
from typing import Any

import msgspec
from starlette.responses import Response

_PLACE = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<place>[^`]*)`$", re.DOTALL)

_ANTHROPIC = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Ends a request with an HTTP status and an error object; `param` names the field at fault.
    `retry_after`: seconds after which another try makes sense, for those whose fault it isn't.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after: int = 5,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The error object, as a client library expects it."""
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code},
        }

    def response(self, path: str) -> Response:
        """The whole HTTP answer, in the shape of the API that `path` belongs to."""
        headers = {"Retry-After": str(self.retry_after)} if self.status in (429, 503) else None
        body = anthropic_body(self) if path.startswith(_ANTHROPIC) else self.body()
        return Response(msgspec.json.encode(body), self.status, headers, media_type="application/json")


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error object of the Messages API."""
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def unavailable(message: str) -> ApiError:
    """503: the engine is gone or the server is leaving; another replica may serve."""
    return ApiError(503, message, kind="server_error", code="service_unavailable")


def not_supported(param: str, message: str) -> ApiError:
    """400 for a field that is known but not served here: silently ignoring it would give a wrong answer."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def invalid(param: str, message: str) -> ApiError:
    """400 for a field with a wrong value."""
    return ApiError(400, message, param=param, code="invalid_value")


def from_validation(error: msgspec.ValidationError | msgspec.DecodeError) -> ApiError:
    """400 for a body of a wrong shape, naming the field where msgspec found it."""
    found = _PLACE.match(str(error))
    if found is None:
        return ApiError(400, f"the body can't be read: {error}", code="invalid_body")
    place = found["place"]
    return ApiError(400, f"{place}: {found['what']}", param=place or None, code="invalid_type")
