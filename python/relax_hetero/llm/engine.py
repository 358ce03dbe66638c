"""`rh.llm.Engine`: requests that come while others run, over one model."""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..errors import HeteroError
from .errors import EngineClosedError, EngineFullError, RequestError
from .model import Model, TokenizerProtocol
from .params import SamplingParams
from .request import Request
from .scheduler import Load, Scheduler
from .sequence import Sequence

# Statistics of an engine, for people and for monitors.

# Seconds over which speeds are means.
WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class Statistics:
    """A look at an engine.

    Attributes
    ----------
    waiting, running : int
        Requests without and with a slot.
    finished : dict of str to int
        Requests that ended, by reason.
    prompt_tokens : int
        Tokens that were prefilled.
    reused_tokens : int
        Tokens of prompts that were in the cache already.
    tokens : int
        Tokens that were written.
    preempted : int
        How often a request gave its pages to an older one.
    cached_tokens : int
        Tokens in the cache now.
    tokens_per_second : float
        Written, over the last ten seconds.
    ttft_seconds : float
        The mean of the last hundred requests that got one; 0 before there is any.
    """

    waiting: int
    running: int
    finished: dict[str, int]
    prompt_tokens: int
    reused_tokens: int
    tokens: int
    preempted: int
    cached_tokens: int
    tokens_per_second: float
    ttft_seconds: float


class Speed:
    """Tokens per second over the last seconds.

    Parameters
    ----------
    clock : callable
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def see(self, total: int) -> None:
        """So many tokens were written in all by now."""
        now = self._clock()
        if now - self._seen[-1][0] < WINDOW_SECONDS / 100:  # a hundred points are enough
            return
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_SECONDS:
            self._seen.popleft()

    def mean(self, total: int) -> float:
        """Tokens per second, if `total` are written by now."""
        seen, now = list(self._seen), self._clock()
        begin, before = next((point for point in reversed(seen) if now - point[0] >= WINDOW_SECONDS), seen[0])
        return (total - before) / (now - begin) if now > begin else 0.0


TOO_LONG = "context_length_exceeded"
"""The code of errors about prompts that do not fit."""
# Requests whose time to the first token is remembered.
_MAX_TIMES = 100


class Engine:
    """Writes texts for many callers at once.

    A thread works in steps: one request at most gets a chunk of its prompt into the cache, and all others get a token
    (`Scheduler` says what happens when the cache is full). All methods may be called by any thread.

    Parameters
    ----------
    model : Model
        `Model`, used by this engine alone.
    tokenizer : TokenizerProtocol
        `TokenizerProtocol`, such as a `Tokenizer`.
    max_waiting : int
        Requests that may wait for a slot.
    prefixes : int
        How many sequences of finished requests are kept for requests that begin alike; 0 for none.

    Examples
    --------
    >>> with Engine(*load("model.gguf")) as engine:  # doctest: +SKIP
    ...     for delta in engine.submit("Once upon a time", SamplingParams(max_tokens=50)):
    ...         print(delta.text, end="")
    """

    def __init__(
        self, model: Model, tokenizer: TokenizerProtocol, *, max_waiting: int = 256, prefixes: int = 8
    ) -> None:
        if max_waiting < 0 or prefixes < 0:
            raise HeteroError(f"expected no negative numbers, found max_waiting={max_waiting}, prefixes={prefixes}")
        self.model, self.tokenizer = model, tokenizer
        self._max_waiting = max_waiting
        self._scheduler = Scheduler(model, prefixes)
        self._speed = Speed()
        self._changed = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._arrivals = 0
        self._load = Load()
        self._first_tokens: deque[float] = deque(maxlen=_MAX_TIMES)
        self._unanswered: list[Request] = []
        self._has_changes = False
        self._closed = False
        self._fault: HeteroError | None = None
        self._thread = threading.Thread(target=self._work, name="relax_hetero.llm.Engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: str | Tokens[int], params: SamplingParams | None = None) -> Request:
        """Ask for a text.

        Parameters
        ----------
        prompt : str or Tokens of int
            A text, or tokens.
        params : SamplingParams, optional
            How it goes on and ends.

        Returns
        -------
        Request
            Gives the text as it grows; returns at once.

        Raises
        ------
        RequestError
            If the prompt is empty, longer than the model's context, or has a token that the model lacks; or if the
            parameters name such a token.
        EngineFullError
            If too many requests wait already.
        EngineClosedError
            If the engine was closed.
        """
        params = params or SamplingParams()
        params.check_tokens(self.model.vocabulary)
        tokens = self.tokens_of(prompt) if isinstance(prompt, str) else _tokens(prompt)
        self.check_prompt(tokens)
        request = Request(tuple(tokens), params, self._wake)
        with self._changed:
            if self._closed:
                raise self._fault or EngineClosedError("the engine was closed")
            waiting = len(self._inbox) + self._load.waiting
            if waiting >= self._max_waiting + max(0, self.model.slots - self._load.active):
                raise EngineFullError(f"found {waiting} requests that wait, expected at most {self._max_waiting}")
            self._arrivals += 1
            self._inbox.append(Sequence(request, self._arrivals, self.tokenizer, self.model.context))
            self._notify_thread()
        return request

    def tokens_of(self, text: str) -> list[int]:
        """The tokens of a prompt.

        Parameters
        ----------
        text : str
            Prompt.

        Raises
        ------
        RequestError
            If it has half of a pair of surrogates, which is no character; or if it is so long that it has more tokens
            than the context, which needs no look at them.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            wrong = text[error.start]
            raise RequestError(f"prompt: found {wrong!r}, which is no character, expected text of Unicode") from error
        self.check_length(text, size)
        return self.tokenizer.encode(text)

    def check_length(self, text: str, size: int | None = None) -> None:
        """RequestError if a text of `size` bytes has more tokens than the context, which needs no look at them.

        Parameters
        ----------
        text : str
            Prompt.
        size : int, optional
            Size in bytes where the caller knows it.
        """
        size = len(text.encode("utf-8", "surrogatepass")) if size is None else size
        token_bytes = getattr(self.tokenizer, "max_token_bytes", None)
        if token_bytes and size > token_bytes * self.model.context:
            raise RequestError(
                f"prompt: found {size:,} bytes, which are more than {size // token_bytes:,} tokens, expected at most "
                f"{self.model.context - 1:,}",
                TOO_LONG,
            )

    def check_prompt(self, tokens: Tokens[int]) -> None:
        """RequestError if a prompt's tokens are none that the model can go on with.

        Parameters
        ----------
        tokens : Tokens of int
            Tokens of the prompt.
        """
        if not tokens:
            raise RequestError("prompt: found no token, expected at least one")
        if len(tokens) >= self.model.context:
            raise RequestError(
                f"prompt: found {len(tokens):,} tokens, expected at most {self.model.context - 1:,}, so that one more "
                f"fits into the model's context of {self.model.context:,}",
                TOO_LONG,
            )
        wrong = next((token for token in tokens if not 0 <= token < self.model.vocabulary), None)
        if wrong is not None:
            raise RequestError(f"prompt: found token {wrong}, expected 0 to {self.model.vocabulary - 1}")

    def statistics(self) -> Statistics:
        """Statistics of the engine so far, and its present load."""
        counts, first = self._scheduler.counts, list(self._first_tokens)
        with self._changed:
            inbox, load = len(self._inbox), self._load
        return Statistics(
            waiting=inbox + load.waiting,
            running=load.active,
            finished={str(reason): count for reason, count in counts.finished.items()},
            prompt_tokens=counts.prompt_tokens,
            reused_tokens=counts.reused_tokens,
            tokens=counts.tokens,
            preempted=counts.preempted,
            cached_tokens=load.cached_tokens,
            tokens_per_second=self._speed.mean(counts.tokens),
            ttft_seconds=sum(first) / len(first) if first else 0.0,
        )

    @property
    def healthy(self) -> bool:
        """True if requests are taken."""
        return not self._closed and self._thread.is_alive()

    def close(self) -> None:
        """End all requests as cancelled, and the thread; nothing if that was done before."""
        with self._changed:
            self._closed = True
            self._notify_thread()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._notify_thread()

    def _notify_thread(self) -> None:
        self._has_changes = True
        self._changed.notify_all()

    def _work(self) -> None:
        """Work of the thread."""
        try:
            while self._take_changes():
                while self._scheduler.step():
                    self._update_load()
                    if not self._take_changes(wait=False):
                        break
                self._update_load()
            self._end_all(None)
        except BaseException as error:  # a defect: nobody may wait for it forever
            fault = EngineClosedError(f"the engine ended by {type(error).__name__}: {error}")
            fault.__cause__ = error
            self._end_all(fault)

    def _take_changes(self, wait: bool = True) -> bool:
        """Take the requests that came; False if the engine was closed."""
        with self._changed:
            self._load = self._scheduler.load()
            if wait:
                self._changed.wait_for(lambda: self._has_changes or self._closed)
            self._has_changes = False
            while self._inbox:
                sequence = self._inbox.popleft()
                self._scheduler.add(sequence)
                self._unanswered.append(sequence.request)
            self._load = self._scheduler.load()
            return not self._closed

    def _update_load(self) -> None:
        """Remember how fast it goes."""
        self._speed.see(self._scheduler.counts.tokens)
        answered = [request for request in self._unanswered if request.times.first_token or request.finish_reason]
        if answered:
            self._unanswered = [request for request in self._unanswered if request not in answered]
            times = (request.times for request in answered)
            self._first_tokens.extend(at.first_token - at.submitted for at in times if at.first_token)

    def _end_all(self, fault: HeteroError | None) -> None:
        with self._changed:
            self._closed, self._fault = True, fault
            left = list(self._inbox)
            self._inbox.clear()
        reason, error = ("cancelled", None) if fault is None else ("error", fault)
        for sequence in left:
            sequence.finish(reason, error)  # type: ignore[arg-type]
        self._scheduler.end_all(reason, error)  # type: ignore[arg-type]
        self._load = self._scheduler.load()


def _tokens(prompt: Any) -> list[int]:
    """A prompt of numbers; RequestError if it is none."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(f"prompt: found {prompt!r:.100}, expected a text or a list of whole numbers") from error
