"""`rh.llm.Engine`: continuous batching of requests over one model."""

from __future__ import annotations

import operator
import threading
import time
from collections import abc, deque
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

from ..artifact.file_hints import describe_value
from ..errors import HeteroError
from .draft_model import DraftModel
from .errors import EngineClosedError, EngineFullError, RequestError
from .model import Model, TokenizerProtocol
from .params import SamplingParams
from .request import Completion, Request
from .scheduler import Load, Scheduler
from .sequence import Sequence
from .special_tokens import NamingTokenizer
from .speculation import PromptLookup, Proposer
from .structured_output import Grammars

SPEED_WINDOW_SECONDS = 10.0  # seconds over which `Statistics.tokens_per_second` is averaged
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's error code for prompts that do not fit into the context
_MAX_TTFT_SAMPLES = 100


@dataclass(frozen=True)
class Statistics:
    """Statistics of an engine.

    Attributes
    ----------
    waiting, running : int
        Number of requests without and with a slot.
    finished : dict of str to int
        Number of requests that have ended, by reason.
    prompt_tokens : int
        Tokens that were prefilled.
    reused_tokens : int
        Tokens of prompts that were in the cache already (prefix cache hits).
    tokens : int
        Tokens that were generated.
    preempted : int
        Number of preemptions, in which a request gives its pages to an older one.
    drafted, accepted : int
        Tokens that were drafted, by prompt look-up or a draft model, and those of them that were right.
    cached_tokens : int
        Tokens in the cache now.
    tokens_per_second : float
        Generated tokens, over the last `SPEED_WINDOW_SECONDS`.
    ttft_seconds : float
        Mean time to first token of the last hundred requests; 0 before the first.
    """

    waiting: int
    running: int
    finished: dict[str, int]
    prompt_tokens: int
    reused_tokens: int
    tokens: int
    preempted: int
    drafted: int
    accepted: int
    cached_tokens: int
    tokens_per_second: float
    ttft_seconds: float


class Speed:
    """Generated tokens per second over the last `SPEED_WINDOW_SECONDS`. `clock`: function that returns seconds."""

    def __init__(self, clock: abc.Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque([(clock(), 0)])

    def update(self, total: int) -> None:
        """Record the total number of tokens so far."""
        now = self._clock()
        if now - self._points[-1][0] < SPEED_WINDOW_SECONDS / 100:  # at most about a hundred points
            return
        self._points.append((now, total))
        while len(self._points) > 2 and now - self._points[1][0] >= SPEED_WINDOW_SECONDS:
            self._points.popleft()

    def mean(self, total: int) -> float:
        """Tokens per second, given the total number of tokens so far."""
        points, now = list(self._points), self._clock()
        old_points = (point for point in reversed(points) if now - point[0] >= SPEED_WINDOW_SECONDS)
        start, start_total = next(old_points, points[0])
        return (total - start_total) / (now - start) if now > start else 0.0


class Engine:
    """Generates texts for many callers at once.

    A thread works in steps: each prefills a chunk of at most one prompt, and decodes one token of each running request
    (see `Scheduler`). All methods are thread-safe.

    Parameters
    ----------
    model : Model
        Model, used by this engine only.
    tokenizer : TokenizerProtocol
        Tokenizer of the model, such as a `Tokenizer`.
    max_waiting : int
        Maximum number of requests that wait for a slot.
    prefixes : int
        Maximum number of finished sequences in the prefix cache; 0 turns it off.
    prompt_lookup : bool
        Whether texts that repeat themselves or their prompt take fewer steps, where this pays (`Model.decode_rows`).
    draft : Model, optional
        Draft model with the same vocabulary, used by this engine only; by default the one that `load` was given.

    Examples
    --------
    >>> with Engine(*load("model.gguf")) as engine:  # doctest: +SKIP
    ...     for delta in engine.submit("Once upon a time", SamplingParams(max_tokens=50)):
    ...         print(delta.text, end="")
    """

    def __init__(
        self,
        model: Model,
        tokenizer: TokenizerProtocol,
        *,
        max_waiting: int = 256,
        prefixes: int = 8,
        prompt_lookup: bool = True,
        draft: Model | None = None,
    ) -> None:
        if max_waiting < 0 or prefixes < 0:
            raise HeteroError(f"expected no negative numbers, found max_waiting={max_waiting}, prefixes={prefixes}")
        self.model, self.tokenizer = model, tokenizer
        self._max_waiting = max_waiting
        if not isinstance(model, Model):
            raise HeteroError(
                f"model: {describe_value(model)}; expected an rh.llm.Model, the first of the pair that load returns"
            )
        draft = model.draft if draft is None else draft
        if draft is not None and (draft is model or not isinstance(draft, Model)):
            found = "the model itself" if draft is model else describe_value(draft)
            raise HeteroError(f"draft: {found}; expected another model, the first of the pair that load returns")
        if draft is not None and not model.decode_rows:
            raise HeteroError(
                "draft: the model's decode steps take one row of each text, expected some that verify drafts; on GPUs, "
                "load its file with draft= or verify_drafts=True (ONNX decoders verify drafts on CPUs only, and models "
                "whose layers have states verify none)"
            )
        proposers: list[Proposer] = [PromptLookup()] if prompt_lookup else []
        proposers += [] if draft is None else [DraftModel(draft, model.vocabulary)]
        self._scheduler = Scheduler(model, prefixes, proposers)
        self._grammars = Grammars(tokenizer, model.vocabulary)
        self._naming_tokenizer = lru_cache(8)(partial(NamingTokenizer, tokenizer))
        self._speed = Speed()
        self._changed = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._arrivals = 0
        self._load = Load()
        self._ttft_seconds: deque[float] = deque(maxlen=_MAX_TTFT_SAMPLES)
        self._awaiting_first_token: list[Request] = []
        self._notified = False
        self._closed = False
        self._fault: HeteroError | None = None
        self._thread = threading.Thread(target=self._run_loop, name="relax_hetero.llm.Engine", daemon=True)
        self._thread.start()

    def submit(self, prompt: str | abc.Sequence[int], params: SamplingParams | None = None) -> Request:
        """Submit a request; returns at once.

        Parameters
        ----------
        prompt : str or sequence of int
            Text, or token ids.
        params : SamplingParams, optional
            Sampling parameters and stop conditions.

        Returns
        -------
        Request
            Handle that streams the text.

        Raises
        ------
        RequestError
            If the prompt is empty, longer than the model's context, or a token of the prompt or the parameters is not
            in the vocabulary, or `SamplingParams.structured_outputs` are invalid.
        EngineFullError
            If too many requests are waiting.
        EngineClosedError
            If the engine is closed.
        """
        params = params or SamplingParams()
        params.check_tokens(self.model.vocabulary)
        tokens = self.tokens_of(prompt) if isinstance(prompt, str) else _parse_tokens(prompt)
        self.check_prompt(tokens)
        if params.prompt_logprobs is not None and not self.model.prompt_chunk:
            raise RequestError("prompt_logprobs: the model cannot return logits of all tokens of a prompt")
        outputs = params.structured_outputs
        constraint = None if outputs is None else self._grammars.constraint(outputs)
        tokenizer = self._naming_tokenizer(params.visible_tokens) if params.visible_tokens else self.tokenizer
        request = Request(tuple(tokens), params, self._wake)
        with self._changed:
            if self._closed:
                raise self._fault or EngineClosedError("the engine was closed")
            waiting = len(self._inbox) + self._load.waiting  # some of them may take a free slot at the next step
            if waiting >= self._max_waiting + max(0, self.model.slots - self._load.active):
                raise EngineFullError(f"found {waiting} waiting requests, expected at most {self._max_waiting}")
            self._arrivals += 1
            sequence = Sequence(request, self._arrivals, tokenizer, self.model.context, constraint)
            self._inbox.append(sequence)
            self._notify_thread()
        return request

    def generate(
        self,
        prompts: str | abc.Sequence[str] | abc.Sequence[abc.Sequence[int]],
        params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate the texts of prompts, and wait for all of them; more than `max_waiting` are submitted by and by.

        Parameters
        ----------
        prompts : str, sequence of str, or sequence of sequences of int
            One text, or texts or token ids of each prompt.
        params : SamplingParams or sequence of SamplingParams, optional
            Sampling parameters of all prompts, or of each.

        Returns
        -------
        list of Completion
            Completions in the order of the prompts.

        Raises
        ------
        HeteroError
            See `submit`, and if a request fails; then the others are cancelled.

        Examples
        --------
        >>> with Engine(*load("model.gguf")) as engine:  # doctest: +SKIP
        ...     print(engine.generate(["One", "Two"], SamplingParams(max_tokens=9))[1].text)
        """
        texts: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
        all_params = [params] * len(texts) if isinstance(params, SamplingParams) or params is None else list(params)
        if len(all_params) != len(texts):
            raise RequestError(f"params: found {len(all_params)}, expected one for each of {len(texts)} prompts")
        requests: list[Request] = []
        completions: list[Completion] = []
        try:
            for text, each in zip(texts, all_params, strict=True):
                while True:
                    try:
                        requests.append(self.submit(text, each))
                        break
                    except EngineFullError:
                        if len(completions) == len(requests):  # others fill the queue
                            raise
                        completions.append(Completion.wait(requests[len(completions)]))
            completions += [Completion.wait(request) for request in requests[len(completions) :]]
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return completions

    def tokens_of(self, text: str) -> list[int]:
        """Encode a prompt.

        Parameters
        ----------
        text : str
            Prompt.

        Raises
        ------
        RequestError
            If it has a lone surrogate, or is so long that it cannot fit into the context.
        """
        try:
            size = len(text.encode())
        except UnicodeEncodeError as error:
            symbol = text[error.start]
            raise RequestError(f"prompt: found {symbol!r}, which is not a character, expected Unicode text") from error
        self.check_length(text, size)
        return self.tokenizer.encode(text)

    def check_length(self, text: str, size: int | None = None) -> None:
        """Raise RequestError if a text exceeds the context even if all its tokens were the vocabulary's longest.

        Parameters
        ----------
        text : str
            Prompt.
        size : int, optional
            Size in bytes, if the caller knows it.
        """
        size = len(text.encode("utf-8", "surrogatepass")) if size is None else size
        max_token_bytes = getattr(self.tokenizer, "max_token_bytes", None)
        if max_token_bytes and size > max_token_bytes * self.model.context:
            raise RequestError(
                f"prompt: found {size:,} bytes, which are more than {size // max_token_bytes:,} tokens, expected "
                f"at most {self.model.context - 1:,}",
                CONTEXT_LENGTH_EXCEEDED,
            )

    def check_prompt(self, tokens: abc.Sequence[int]) -> None:
        """Raise RequestError if a prompt is empty, too long, or has tokens that are not in the vocabulary.

        Parameters
        ----------
        tokens : sequence of int
            Tokens of the prompt.
        """
        if not tokens:
            raise RequestError("prompt: found no token, expected at least one")
        if len(tokens) >= self.model.context:
            raise RequestError(
                f"prompt: found {len(tokens):,} tokens, expected at most {self.model.context - 1:,}, so that one more "
                f"fits into the model's context of {self.model.context:,}",
                CONTEXT_LENGTH_EXCEEDED,
            )
        invalid = next((token for token in tokens if not 0 <= token < self.model.vocabulary), None)
        if invalid is not None:
            raise RequestError(f"prompt: found token {invalid}, expected 0 to {self.model.vocabulary - 1}")

    def statistics(self) -> Statistics:
        """Return counts since the start, and the current load."""
        counts, ttft = self._scheduler.counts, list(self._ttft_seconds)
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
            drafted=self._scheduler.speculation.drafted,
            accepted=self._scheduler.speculation.accepted,
            cached_tokens=load.cached_tokens,
            tokens_per_second=self._speed.mean(counts.tokens),
            ttft_seconds=sum(ttft) / len(ttft) if ttft else 0.0,
        )

    @property
    def healthy(self) -> bool:
        """True if the engine accepts requests."""
        return not self._closed and self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """True unless functions of the model are still being compiled; requests are accepted meanwhile."""
        return self.model.is_complete

    def close(self) -> None:
        """Cancel all requests and end the thread; calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._notify_thread()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._grammars.close()

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
        self._notified = True
        self._changed.notify_all()

    def _run_loop(self) -> None:
        """Main function of the thread."""
        try:
            while self._take_arrivals():
                while self._scheduler.step():
                    self._update_statistics()
                    if not self._take_arrivals(wait=False):
                        break
                self._update_statistics()
            self._end_all(None)
        except BaseException as error:  # a defect; without an end, callers would wait forever
            fault = EngineClosedError(f"the engine has failed: {type(error).__name__}: {error}")
            fault.__cause__ = error
            self._end_all(fault)

    def _take_arrivals(self, wait: bool = True) -> bool:
        """Hand new requests to the scheduler; False if the engine was closed."""
        with self._changed:
            if wait:
                self._load = self._scheduler.load()
                self._changed.wait_for(lambda: self._notified or self._closed)
            self._notified = False
            while self._inbox:
                sequence = self._inbox.popleft()
                self._scheduler.add(sequence)
                self._awaiting_first_token.append(sequence.request)
            self._load = self._scheduler.load()
            return not self._closed

    def _update_statistics(self) -> None:
        """Record speed and times to first token."""
        self._speed.update(self._scheduler.counts.tokens)
        waiting = self._awaiting_first_token
        started = [request for request in waiting if request.times.first_token or request.finish_reason]
        if started:
            self._awaiting_first_token = [request for request in waiting if request not in started]
            all_times = (request.times for request in started)
            self._ttft_seconds.extend(times.first_token - times.submitted for times in all_times if times.first_token)

    def _end_all(self, fault: HeteroError | None) -> None:
        with self._changed:
            self._closed, self._fault = True, fault
            waiting = list(self._inbox)
            self._inbox.clear()
        reason, error = ("cancelled", None) if fault is None else ("error", fault)
        for sequence in waiting:
            sequence.finish(reason, error)  # type: ignore[arg-type]
        self._scheduler.end_all(reason, error)  # type: ignore[arg-type]
        self._load = self._scheduler.load()


def _parse_tokens(prompt: Any) -> list[int]:
    """Convert a prompt of token ids to a list of int."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise RequestError(f"prompt: found {prompt!r:.100}, expected a text or a list of whole numbers") from error
