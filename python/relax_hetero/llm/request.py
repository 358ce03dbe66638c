"""A request to the engine, as its caller sees it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ..errors import HeteroError
from .params import SamplingParams
from .text_stream import Delta

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Usage:
    """Tokens that a request took.

    Attributes
    ----------
    prompt_tokens, completion_tokens : int
        How many.
    cached_tokens : int
        Those of the prompt whose keys and values were in the cache already.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """All of them."""
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Times:
    """When things happened to a request, in seconds of `time.monotonic`; 0 for what has not happened yet."""

    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class Request:
    """A text that a model writes.

    Iterating over it, by ``for`` or by ``async for``, gives the `Delta` objects of the text as it grows, and raises
    what went wrong at the end, if anything did. Each delta is given once, so that one reader gets the whole text.

    Parameters
    ----------
    prompt, params
        As attributes.
    on_cancel : callable
        Function that `cancel` calls.

    Attributes
    ----------
    prompt : tuple of int
        Its tokens.
    params : SamplingParams
        As submitted.
    times : Times
        When it was submitted, told its first token and finished.
    """

    def __init__(self, prompt: tuple[int, ...], params: SamplingParams, on_cancel: Callable[[], None]) -> None:
        self.prompt, self.params = prompt, params
        self.times = Times(submitted=time.monotonic())
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._deltas: deque[Delta] = deque()
        self._reader: Callable[[], object] | None = None  # wakes a reader in an event loop
        self._reason: FinishReason | None = None
        self._error: HeteroError | None = None
        self._tokens = self._cached = 0
        self._cancelled = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, None while it grows.

        ``stop`` for a stop string or token, ``length`` for `max_tokens` or the model's context, ``cancelled``, or
        ``error``.
        """
        return self._reason

    @property
    def error(self) -> HeteroError | None:
        """Error of the request, if there was one."""
        return self._error

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(len(self.prompt), self._tokens, self._cached)

    @property
    def cancelled(self) -> bool:
        """True if somebody cancelled it; the engine may not have noticed yet."""
        return self._cancelled

    def cancel(self) -> None:
        """End the text here; nothing if it ended already. Any thread may call this."""
        if not self._cancelled:
            self._cancelled = True
            self._on_cancel()

    def result(self, timeout: float | None = None) -> str:
        """The rest of the text, once it has ended.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most; TimeoutError after them, and the request goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._reason is not None, timeout):
                raise TimeoutError(f"the text has not ended after {timeout:g} s")
        return "".join(delta.text for delta in self)

    def __iter__(self) -> Iterator[Delta]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._deltas or self._reason is not None)
                if not self._deltas:
                    break
                delta = self._deltas.popleft()
            yield delta
        self._raise()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._reader = lambda: loop.call_soon_threadsafe(wake.set)
        while True:
            wake.clear()
            with self._changed:
                deltas, ended = list(self._deltas), self._reason is not None
                self._deltas.clear()
            for delta in deltas:
                yield delta
            if ended:
                break
            if not deltas:
                await wake.wait()
        self._raise()

    # What follows is called by the engine.

    def append(self, delta: Delta) -> None:
        """Hand a part of the text to the reader.

        Parameters
        ----------
        delta : Delta
            Next part of the text.
        """
        with self._changed:
            self._deltas.append(delta)
            self._wake()

    def count(self, tokens: int, cached: int) -> None:
        """Take over how many tokens the text has, and how many of the prompt were in the cache.

        Parameters
        ----------
        tokens : int
            Number of tokens of the text.
        cached : int
            Number of tokens of the prompt that the cache had.
        """
        if tokens and not self._tokens:
            self.times.first_token = time.monotonic()
        self._tokens, self._cached = tokens, cached

    def end(self, reason: FinishReason, error: HeteroError | None = None) -> None:
        """Nothing more comes.

        Parameters
        ----------
        reason : FinishReason
            Reason for which the text ends.
        error : HeteroError, optional
            Error that `result` raises.
        """
        with self._changed:
            if self._reason is None:
                self._reason, self._error = reason, error
                self.times.finished = time.monotonic()
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._reader is not None:
            try:
                self._reader()
            except RuntimeError:  # the reader's event loop was closed, and the reader with it
                self._reader = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
