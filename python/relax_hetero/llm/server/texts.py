"""The texts of one call: as many requests to the engine, which end when the caller goes away."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import Receive

from ..model import TokenizerProtocol
from ..request import Request, Usage
from ..sampling import TokenLogprob
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


# Answers in the form of the two endpoints, whole or in parts.


class ResponseFormat(Protocol):
    """How an endpoint's answers look."""

    def response(self, texts: Sequence[tuple[str, list[TokenLogprob], str]], usage: Usage) -> dict[str, Any]:
        """An answer of texts with their log-probabilities and the reasons of their ends."""

    def begin(self, index: int, text: str) -> dict[str, Any] | None:
        """The first part of a stream's text, which begins with `text`; None if there is none."""

    def chunk(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        """A part of a stream."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last part of a stream."""


class _Answers:
    def __init__(self, codec: TokenizerProtocol, model: str, kind: str, prefix: str, logprobs: bool) -> None:
        self._codec, self._model, self._kind, self._logprobs = codec, model, kind, logprobs
        self._id, self._created = f"{prefix}-{uuid.uuid4().hex}", int(time.time())

    def _answer(self, choices: list[dict[str, Any]], part: bool = False) -> dict[str, Any]:
        kind = f"{self._kind}.chunk" if part and self._kind.startswith("chat") else self._kind
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The last event, with the number of tokens."""
        return {**self._answer([], True), "usage": usage_json(usage)}

    def _text(self, token: int) -> str:
        return self._codec.piece(token).decode("utf-8", "replace")


class CompletionAnswers(_Answers):
    """Answers of ``/v1/completions``."""

    def __init__(self, codec: TokenizerProtocol, model: str, logprobs: bool, choices: int) -> None:
        super().__init__(codec, model, "text_completion", "cmpl", logprobs)
        self._offsets = [0] * choices

    def response(self, texts: Sequence[tuple[str, list[TokenLogprob], str]], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [self._choice(index, *text) for index, text in enumerate(texts)]
        return {**self._answer(choices), "usage": usage_json(usage)}

    def begin(self, index: int, text: str) -> dict[str, Any] | None:
        """The first event of a choice; None where there is nothing to say."""
        return self.chunk(index, text, (), None) if text else None

    def chunk(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        """One event of a choice; the last one has a reason."""
        return self._answer([self._choice(index, text, logprobs, reason)], True)

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        told = self._logprobs_json(index, logprobs) if self._logprobs and logprobs else None
        return {"index": index, "text": text, "logprobs": told, "finish_reason": reason}

    def _logprobs_json(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        tokens = [self._text(entry.token) for entry in logprobs]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [{self._text(t): finite(value) for t, value in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }


class ChatAnswers(_Answers):
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, codec: TokenizerProtocol, model: str, logprobs: bool) -> None:
        super().__init__(codec, model, "chat.completion", "chatcmpl", logprobs)

    def response(self, texts: Sequence[tuple[str, list[TokenLogprob], str]], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": self._logprobs_json(logprobs),
                "finish_reason": reason,
            }
            for index, (text, logprobs, reason) in enumerate(texts)
        ]
        return {**self._answer(choices), "usage": usage_json(usage)}

    def begin(self, index: int, text: str) -> dict[str, Any] | None:
        """The first event of a choice; None where there is nothing to say."""
        delta = {"role": "assistant", "content": text}
        return self._answer([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}], True)

    def chunk(self, index: int, text: str, logprobs: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        """One event of a choice; the last one has a reason."""
        delta = {"content": text} if text else {}
        told = self._logprobs_json(logprobs) if logprobs else None
        return self._answer([{"index": index, "delta": delta, "logprobs": told, "finish_reason": reason}], True)

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
        return {"token": self._text(token), "logprob": finite(logprob), "bytes": list(self._codec.piece(token))}


def usage_json(usage: Usage) -> dict[str, Any]:
    """The tokens of a call."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finite(logprob: float) -> float:
    """A logarithm that JSON can tell; OpenAI's smallest is -9999, too."""
    return max(logprob, -9999.0)
