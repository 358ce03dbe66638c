"""`rh.llm.Request`: the handle of a request, which streams its text."""

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
from .sampling import TokenLogprob
from .text_stream import Delta

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens of a request.

    Attributes
    ----------
    prompt_tokens, completion_tokens : int
        Tokens of the prompt and of the text.
    cached_tokens : int
        Tokens of the prompt that were in the cache already.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and text."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Completion:
    """A complete text.

    Attributes
    ----------
    text : str
        Text.
    tokens : tuple of int
        Its tokens.
    finish_reason : str
        See `Request`.
    usage : Usage
        Numbers of tokens.
    logprobs, prompt_logprobs : tuple of TokenLogprob
        Log-probabilities of the tokens of text and prompt, if requested.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def wait(cls, request: Request) -> Completion:
        """Wait for the end of a request that nobody else reads.

        Parameters
        ----------
        request : Request
            Handle of the text.

        Raises
        ------
        HeteroError
            If the request fails.
        """
        deltas = list(request)
        assert request.finish_reason is not None
        return cls(
            "".join(delta.text for delta in deltas),
            tuple(token for delta in deltas for token in delta.tokens),
            request.finish_reason,
            request.usage,
            tuple(logprob for delta in deltas for logprob in delta.logprobs),
            tuple(request.prompt_logprobs),
        )


@dataclass
class Times:
    """Times of a request's events, in seconds of `time.monotonic`; 0 for events that have not happened."""

    submitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class Request:
    """Handle of a text that an engine generates.

    Iterating over it (``for`` or ``async for``) streams the `Delta` objects of the text, and raises the request's error
    at the end if there is one. Each delta is streamed once: only a single reader gets the whole text.

    Parameters
    ----------
    prompt, params
        See the attributes.
    on_cancel : callable
        Called by `cancel`.

    Attributes
    ----------
    prompt : tuple of int
        Tokens of the prompt.
    params : SamplingParams
        Sampling parameters.
    times : Times
        Times of submission, first token and end.
    prompt_logprobs : list of TokenLogprob
        Log-probabilities of the prompt's tokens, complete with the first delta, if `SamplingParams.prompt_logprobs`
        asks for them.
    """

    def __init__(self, prompt: tuple[int, ...], params: SamplingParams, on_cancel: Callable[[], None]) -> None:
        self.prompt, self.params = prompt, params
        self.times = Times(submitted=time.monotonic())
        self.prompt_logprobs: list[TokenLogprob] = []
        self._on_cancel = on_cancel
        self._changed = threading.Condition()
        self._deltas: deque[Delta] = deque()
        self._wake_reader: Callable[[], object] | None = None  # of a reader in an event loop
        self._finish_reason: FinishReason | None = None
        self._error: HeteroError | None = None
        self._completion_tokens = self._cached_tokens = 0
        self._cancelled = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of the end of the text; None while it grows.

        ``stop`` for a stop string or token, ``length`` for `max_tokens` or the model's context, ``cancelled``, or
        ``error``.
        """
        return self._finish_reason

    @property
    def error(self) -> HeteroError | None:
        """Error of the request, if there is one."""
        return self._error

    @property
    def usage(self) -> Usage:
        """Numbers of tokens so far."""
        return Usage(len(self.prompt), self._completion_tokens, self._cached_tokens)

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called; the engine may not have seen it yet."""
        return self._cancelled

    def cancel(self) -> None:
        """Let the engine end the text at its next step, unless it has ended. Thread-safe."""
        if not self._cancelled:
            self._cancelled = True
            self._on_cancel()

    def result(self, timeout: float | None = None) -> str:
        """Wait for the end, and return the text that was not streamed yet.

        Parameters
        ----------
        timeout : float, optional
            Maximum number of seconds to wait; TimeoutError after that, while the request goes on.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._finish_reason is not None, timeout):
                raise TimeoutError(f"the text has not ended after {timeout:g} s")
        return "".join(delta.text for delta in self)

    def __iter__(self) -> Iterator[Delta]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._deltas or self._finish_reason is not None)
                if not self._deltas:
                    break
                delta = self._deltas.popleft()
            yield delta
        self._raise_error()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            self._wake_reader = lambda: loop.call_soon_threadsafe(wake.set)
        while True:
            wake.clear()
            with self._changed:
                deltas, ended = list(self._deltas), self._finish_reason is not None
                self._deltas.clear()
            for delta in deltas:
                yield delta
            if ended:
                break
            if not deltas:
                await wake.wait()
        self._raise_error()

    # The engine calls the methods below.

    def append(self, delta: Delta) -> None:
        """Append to the text.

        Parameters
        ----------
        delta : Delta
            Text to append, and its tokens.
        """
        with self._changed:
            self._deltas.append(delta)
            self._wake()

    def update_usage(self, tokens: int, cached: int) -> None:
        """Set the numbers of tokens so far.

        Parameters
        ----------
        tokens : int
            Number of tokens of the text.
        cached : int
            Number of tokens of the prompt that were in the cache.
        """
        if tokens and not self._completion_tokens:
            self.times.first_token = time.monotonic()
        self._completion_tokens, self._cached_tokens = tokens, cached

    def finish(self, reason: FinishReason, error: HeteroError | None = None) -> None:
        """End the text.

        Parameters
        ----------
        reason : FinishReason
            Reason of the end.
        error : HeteroError, optional
            Error that readers get.
        """
        with self._changed:
            if self._finish_reason is None:
                self._finish_reason, self._error = reason, error
                self.times.finished = time.monotonic()
            self._wake()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._wake_reader is not None:
            try:
                self._wake_reader()
            except RuntimeError:  # the reader's event loop was closed, and the reader with it
                self._wake_reader = None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
