"""A call of an endpoint: its texts are asked for, and written as one answer or as a stream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ..request import Request
from ..sampling import TokenLogprob
from .answers import ResponseFormat
from .api_errors import ApiError, api_error
from .texts import Texts, wait_for_disconnect

LOG = logging.getLogger(__name__)
GRACE_SECONDS = 10.0
"""Seconds that a caller gets to read the rest of a stream whose time is over."""


async def complete_answer(texts: Texts, form: ResponseFormat, http: HttpRequest) -> Response:
    """The answer when all texts have ended; they are cancelled when the caller goes away."""
    collecting = asyncio.ensure_future(_collected(texts))
    left = asyncio.ensure_future(wait_for_disconnect(http.receive))
    try:
        await asyncio.wait({collecting, left}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)  # nobody reads it; what proxies log for a caller that went away
        return JSONResponse(form.response(collecting.result(), texts.usage))
    finally:
        for task in (collecting, left):
            await _cancelled(task)


async def _collected(texts: Texts) -> list[tuple[str, list[TokenLogprob], str]]:
    parts: list[list[str]] = [[begin] for begin in texts.begins]
    logprobs: list[list[TokenLogprob]] = [[] for _ in parts]
    async for grown in texts.grow():
        if grown.delta is not None:
            parts[grown.index].append(grown.delta.text)
            logprobs[grown.index] += grown.delta.logprobs
    each = zip(parts, logprobs, texts.requests, strict=True)
    return [("".join(some), told, reason_of(request)) for some, told, request in each]


class StreamedAnswer(Response):
    """Server-sent events, one for each part of a text.

    Parameters
    ----------
    texts, form
    tells_usage : bool
        Whether the last event has the number of tokens.
    on_end : callable
        Called at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, texts: Texts, form: ResponseFormat, tells_usage: bool, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._texts, self._form, self._tells_usage, self._on_end = texts, form, tells_usage, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer; stop when the caller goes away, or stays but does not read."""
        writing = asyncio.ensure_future(self._write(send))
        left = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            timeout = self._texts.seconds + GRACE_SECONDS
            await asyncio.wait({writing, left}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except OSError:  # gone while something was sent
            pass
        finally:
            for task in (writing, left):
                await _cancelled(task)
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events():
            data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[dict[str, Any] | str]:
        for index, begin in enumerate(self._texts.begins):
            first = self._form.begin(index, begin)
            if first is not None:
                yield first
        try:
            async for grown in self._texts.grow():
                if grown.delta is None:
                    yield self._form.chunk(grown.index, "", (), reason_of(self._texts.requests[grown.index]))
                elif grown.delta.text or grown.delta.logprobs:
                    yield self._form.chunk(grown.index, grown.delta.text, grown.delta.logprobs, None)
        except Exception as error:
            yield logged(error).body
        else:
            if self._tells_usage:
                yield self._form.usage(self._texts.usage)
        yield "[DONE]"


def reason_of(request: Request) -> str:
    """Why a text ended, in the words of the endpoints."""
    return "length" if request.finish_reason == "length" else "stop"


def logged(error: Exception) -> ApiError:
    """The answer to an error; a defect of the server goes to its log, too."""
    answer = api_error(error)
    if answer.status == 500:
        LOG.error("a request failed", exc_info=error)
    return answer


async def _cancelled(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task
