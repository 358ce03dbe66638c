"""Answers in the form of the two endpoints, whole or in parts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from ..model import TokenizerProtocol
from ..request import Usage
from ..sampling import TokenLogprob


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
