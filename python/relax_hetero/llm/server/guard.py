"""Middleware that checks the API key and the size and speed of the body."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .api_errors import ApiError, api_error

LOG = logging.getLogger(__name__)
_OPEN_PATHS = ("/health", "/metrics")  # paths that need no key


class Guard:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,  # key that all paths except ``/health`` and ``/metrics`` require; None for none
        body_bytes: int,  # maximum number of bytes of a body
        on_answer: Callable[[str, int], None],  # called with the path and status of each answer
        body_seconds: float = 30.0,  # maximum time to receive a body
    ) -> None:
        self._app, self._key, self._max_body_bytes, self._on_answer = app, api_key, body_bytes, on_answer
        self._seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_and_record(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check_headers(scope)
                await self._app(scope, self._limit_body(receive), send_and_record)
            except Exception as error:
                if status:
                    raise
                answer = api_error(error)
                if answer.status == 500:
                    LOG.error("a request failed", exc_info=error)
                await answer.response()(scope, receive, send_and_record)
        finally:
            self._on_answer(scope["path"], status)

    def _check_headers(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._key is not None and scope["path"] not in _OPEN_PATHS:
            kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
            keys = (bearer.strip() if kind.lower() == b"bearer" else b"", headers.get(b"x-api-key", b""))
            # Constant time: no short-circuit.
            if not any([hmac.compare_digest(key, self._key.encode()) for key in keys]):
                message = "found no valid API key, expected it as Authorization: Bearer or x-api-key"
                raise ApiError(401, message, code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            text = length.decode("latin-1")
            raise ApiError(413, f"body: found {text} bytes, expected at most {self._max_body_bytes:,}")

    def _limit_body(self, receive: Receive) -> Receive:
        """Wrap `receive` to raise 413 for a large body (also without a Content-Length) and 408 for a slow one."""
        size, end, is_complete = 0, asyncio.get_running_loop().time() + self._seconds, False

        async def receive_limited() -> Message:
            nonlocal size, is_complete
            timeout = None if is_complete else end - asyncio.get_running_loop().time()
            try:
                message = await asyncio.wait_for(receive(), timeout)
            except asyncio.TimeoutError:  # noqa: UP041 (another than TimeoutError in Python 3.10)
                raise HTTPException(408, f"body: found no end of it within {self._seconds:g} s") from None
            is_complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                # FastAPI passes on only HTTPException from reading a body.
                raise HTTPException(
                    413, f"body: found more than {self._max_body_bytes:,} bytes, expected at most so many"
                )
            return message

        return receive_limited
