"""Choices of a call, each of which is a request to the engine, and their JSON in OpenAI's format."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, Protocol

from starlette.types import Receive

from ..model import TokenizerProtocol
from ..request import Request, Usage
from ..sampling import TokenLogprob
from ..text_stream import Delta
from .api_errors import ApiError
from .tools import AnswerMessages


@dataclass(frozen=True)
class ChoiceDelta:
    """Growth of the text of choice `index`, or its end if `delta` is None."""

    index: int
    delta: Delta | None


class Choices:
    """Choices of one call, with a time limit for all of them."""

    def __init__(
        self,
        requests: Sequence[Request],  # request of each choice
        prefixes: Sequence[str],  # text that precedes the model's, for each choice (``echo``)
        seconds: float,  # time limit
    ) -> None:
        self.requests, self.prefixes = list(requests), list(prefixes)
        self.seconds, self._expired = seconds, False
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    @property
    def usage(self) -> Usage:
        """Sum of the usage of all choices."""
        usages = [request.usage for request in self.requests]
        return Usage(
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
        )

    def close(self) -> None:
        """Cancel all requests."""
        self._timer.cancel()
        for request in self.requests:
            request.cancel()

    async def stream(self) -> AsyncIterator[ChoiceDelta]:
        """Iterate over the growth of all choices, in order of time.

        Raises HeteroError if a request ends with an error. Raises ApiError if the time limit is exceeded.
        """
        if len(self.requests) == 1:
            async for delta in self.requests[0]:
                yield ChoiceDelta(0, delta)
            self._check_time()
            yield ChoiceDelta(0, None)
            return
        async for growth in self._merge():
            if growth.delta is None:
                self._check_time()
            yield growth

    def _expire(self) -> None:
        self._expired = True
        for request in self.requests:
            request.cancel()
            request.finish("cancelled")  # at once, even if the model hangs

    def _check_time(self) -> None:
        if self._expired:
            raise ApiError(504, f"the request took more than {self.seconds:g} s")

    async def _merge(self) -> AsyncIterator[ChoiceDelta]:
        queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue()

        async def read(index: int, request: Request) -> None:
            try:
                async for delta in request:
                    queue.put_nowait(ChoiceDelta(index, delta))
            except Exception as error:
                queue.put_nowait(error)
            else:
                queue.put_nowait(ChoiceDelta(index, None))

        readers = [asyncio.ensure_future(read(index, request)) for index, request in enumerate(self.requests)]
        running = len(readers)
        try:
            while running:
                growth = await queue.get()
                if isinstance(growth, Exception):
                    raise growth
                running -= growth.delta is None
                yield growth
        finally:
            for reader in readers:
                reader.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects; its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class ResponseFormat(Protocol):
    """JSON of an endpoint's answers."""

    def response(self, texts: Sequence[tuple[str, list[TokenLogprob], str]], usage: Usage) -> dict[str, Any]:
        """Complete answer; each choice is a text, its log-probabilities and its finish reason."""

    def begin(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """First chunk of a choice, which begins with `text`; None if the endpoint sends no such chunk."""

    def chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any] | None:
        """Chunk of a choice, None if there is nothing to send; the last one has a finish reason."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Last chunk of a stream, with the usage."""


class _Responses:
    def __init__(self, tokenizer: TokenizerProtocol, model: str, kind: str, prefix: str, logprobs: bool) -> None:
        self._tokenizer, self._model, self._kind, self._logprobs = tokenizer, model, kind, logprobs
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())

    def _response(self, choices: list[dict[str, Any]], is_chunk: bool = False) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if is_chunk and self._kind.startswith("chat") else self._kind
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """See `ResponseFormat`."""
        return {**self._response([], True), "usage": usage_json(usage)}

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token).decode("utf-8", "replace")


class CompletionResponses(_Responses):
    """JSON of ``/v1/completions``."""

    def __init__(self, tokenizer: TokenizerProtocol, model: str, logprobs: bool, choices: int) -> None:
        super().__init__(tokenizer, model, "text_completion", "cmpl", logprobs)
        self._offsets = [0] * choices

    def response(self, texts: Sequence[tuple[str, list[TokenLogprob], str]], usage: Usage) -> dict[str, Any]:
        """See `ResponseFormat`."""
        choices = [self._choice(index, *text) for index, text in enumerate(texts)]
        return {**self._response(choices), "usage": usage_json(usage)}

    def begin(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """See `ResponseFormat`."""
        return self.chunk(index, text, logprobs, None)

    def chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any] | None:
        """See `ResponseFormat`."""
        if not text and not logprobs and reason is None:
            return None
        return self._response([self._choice(index, text, logprobs, reason)], True)

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs_json = self._logprobs_json(index, logprobs) if self._logprobs and logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs_json, "finish_reason": reason}

    def _logprobs_json(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._text(entry.token) for entry in logprobs]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [None if isnan(entry.logprob) else finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [
                None if isnan(entry.logprob) else {self._text(t): finite(value) for t, value in entry.top}
                for entry in logprobs
            ],
            "text_offset": offsets,
        }


class ChatResponses(_Responses):
    """JSON of ``/v1/chat/completions``. `answers`: answer of each choice."""

    def __init__(self, tokenizer: TokenizerProtocol, model: str, logprobs: bool) -> None:
        super().__init__(tokenizer, model, "chat.completion", "chatcmpl", logprobs)
        self.answers: list[AnswerMessages] = []

    def response(self, texts: Sequence[tuple[str, list[TokenLogprob], str]], usage: Usage) -> dict[str, Any]:
        """See `ResponseFormat`."""
        choices = [
            {
                "index": index,
                "message": self.answers[index].message(text),
                "logprobs": self._logprobs_json(logprobs),
                "finish_reason": self._finish_reason(index, reason),
            }
            for index, (text, logprobs, reason) in enumerate(texts)
        ]
        return {**self._response(choices), "usage": usage_json(usage)}

    def begin(self, index: int, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """See `ResponseFormat`."""
        delta = {"role": "assistant", "content": text}
        return self._response([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], True)

    def chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None
    ) -> dict[str, Any] | None:
        """See `ResponseFormat`."""
        delta = self.answers[index].delta(text, reason is not None)
        logprobs_json = self._logprobs_json(logprobs) if logprobs else None
        if not delta and logprobs_json is None and reason is None:
            return None
        reason = None if reason is None else self._finish_reason(index, reason)
        return self._response(
            [{"index": index, "delta": delta, "logprobs": logprobs_json, "finish_reason": reason}], True
        )

    def _finish_reason(self, index: int, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self.answers[index].calls else reason

    def _logprobs_json(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._text(token), "logprob": finite(logprob), "bytes": list(self._tokenizer.piece(token))}


def usage_json(usage: Usage) -> dict[str, Any]:
    """JSON of the usage of a call."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finite(logprob: float) -> float:
    """Replace -inf, which JSON lacks, by OpenAI's smallest log-probability."""
    return max(logprob, -9999.0)
