"""Errors in OpenAI's form."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from ...errors import HeteroError, printable
from ..errors import EngineClosedError, EngineFullError, RequestError, TokenizerError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_MAX_CHARACTERS = 2000  # maximum length of a message, which may quote the request


class ApiError(Exception):
    """An error that is answered. `status`: HTTP status; `body`: JSON of the answer."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = _KINDS.get(status, "server_error")
        message = printable(message)[:_MAX_CHARACTERS]
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """Make the answer."""
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def api_error(error: Exception) -> ApiError:
    """Convert an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        name, colon, _ = str(error).partition(":")
        name = name.partition(" ")[0]
        return ApiError(400, str(error), param=name if colon and name.isidentifier() else None, code=error.code)
    if isinstance(error, EngineFullError):
        return ApiError(429, str(error), code="engine_full")
    if isinstance(error, EngineClosedError):
        return ApiError(503, str(error))
    if isinstance(error, TokenizerError):
        return ApiError(400, str(error))
    if isinstance(error, UnicodeEncodeError):  # JSON may have these
        return ApiError(400, "found half of a pair of surrogates, expected Unicode text")
    if isinstance(error, HeteroError):
        return ApiError(500, str(error))
    return ApiError(500, "the server failed")  # details go to the log only
