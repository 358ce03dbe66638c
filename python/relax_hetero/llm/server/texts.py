"""The texts of one call: as many requests to the engine, which end when the caller goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from ..request import Request, Usage
from ..text_stream import Delta
from .api_errors import ApiError


@dataclass(frozen=True)
class TextDelta:
    """Growth of one of the texts; without a `delta` it has ended."""

    index: int
    delta: Delta | None


class Texts:
    """The requests of one call.

    Parameters
    ----------
    requests : sequence of Request
        One for each choice.
    begins : sequence of str
        Begin of each text, before the model's.
    seconds : float
        Maximum time of all of them.

    Attributes
    ----------
    requests, begins, seconds
        As given.
    """

    def __init__(self, requests: Sequence[Request], begins: Sequence[str], seconds: float) -> None:
        self.requests, self.begins = list(requests), list(begins)
        self.seconds, self._expired = seconds, False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    @property
    def usage(self) -> Usage:
        """Usage of all texts; prompts of several choices count once each."""
        each = [request.usage for request in self.requests]
        return Usage(
            sum(usage.prompt_tokens for usage in each),
            sum(usage.completion_tokens for usage in each),
            sum(usage.cached_tokens for usage in each),
        )

    def close(self) -> None:
        """End all that have not ended."""
        self._timer.cancel()
        for request in self.requests:
            request.cancel()

    async def grow(self) -> AsyncIterator[TextDelta]:
        """Iterate over growth of texts, in the order in which it comes.

        Raises
        ------
        HeteroError
            If a request ends with an error.
        ApiError
            If they take too long.
        """
        if len(self.requests) == 1:
            async for delta in self.requests[0]:
                yield TextDelta(0, delta)
            self._check()
            yield TextDelta(0, None)
            return
        async for grown in self._together():
            if grown.delta is None:
                self._check()
            yield grown

    def _expire(self) -> None:
        self._expired = True
        for request in self.requests:
            request.cancel()
            request.end("cancelled")  # now, even if the model hangs

    def _check(self) -> None:
        if self._expired:
            raise ApiError(504, f"the request took more than {self.seconds:g} s")

    async def _together(self) -> AsyncIterator[TextDelta]:
        news: asyncio.Queue[TextDelta | Exception] = asyncio.Queue()

        async def read(index: int, request: Request) -> None:
            try:
                async for delta in request:
                    news.put_nowait(TextDelta(index, delta))
            except Exception as error:
                news.put_nowait(error)
            else:
                news.put_nowait(TextDelta(index, None))

        readers = [asyncio.ensure_future(read(index, request)) for index, request in enumerate(self.requests)]
        left = len(readers)
        try:
            while left:
                grown = await news.get()
                if isinstance(grown, Exception):
                    raise grown
                left -= grown.delta is None
                yield grown
        finally:
            for reader in readers:
                reader.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the caller has gone away; its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
