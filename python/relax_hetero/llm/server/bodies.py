"""Requests of callers, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..params import SamplingParams
from .api_errors import ApiError
from .fields import CHANGES, STREAM_CHANGES, refuse_changes
from .messages import Message

_DIGITS = 9
"""Digits of a token's number at most; no model has larger ones."""


def _or(default: Any) -> BeforeValidator:
    """A field that may be null, which stands for its default."""
    return BeforeValidator(lambda value: default if value is None else value)


_Switch = Annotated[bool, _or(False)]


class StreamOptions(BaseModel):
    """Content of a stream besides the text."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: _Switch = False


class Body(BaseModel):
    """The fields of both endpoints. Others are refused if they would change the answer (`fields`), or ignored."""

    model_config = ConfigDict(strict=True, extra="allow")
    changes: ClassVar[Mapping[str, tuple[Any, ...]]] = CHANGES
    model: str | None = None
    stream: _Switch = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, _or(1), Field(ge=1)] = 1
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    # These are not OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """Move fields of ``extra_body`` beside the others, where the OpenAI clients themselves put them."""
        extra = given.get("extra_body") if isinstance(given, dict) else None
        return {**given, "extra_body": None, **extra} if isinstance(extra, dict) else given

    def refuse_unsupported(self) -> None:
        """ApiError for what would be ignored, and changes the answer."""
        refuse_changes(self.model_extra or {}, self.changes)
        if self.stream_options is not None:
            refuse_changes(self.stream_options.model_extra or {}, STREAM_CHANGES, "stream_options.")

    @property
    def tells_usage(self) -> bool:
        """True if a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, choice: int, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The parameters of one of the `n` texts; each has a seed of its own.

        Raises
        ------
        RequestError
            If one is outside of its range.
        """
        names = (
            "temperature",
            "top_p",
            "frequency_penalty",
            "presence_penalty",
            "top_k",
            "min_p",
            "repetition_penalty",
            "ignore_eos",
        )
        given = {name: getattr(self, name) for name in names}
        if self.top_k == -1:  # vLLM's word for all
            given["top_k"] = 0
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            logit_bias=_biases(self.logit_bias or {}),
            seed=None if self.seed is None else self.seed + choice,
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
        )


class CompletionBody(Body):
    """Request to ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: _Switch = False
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """One or more, each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt: found an empty list, expected at least one prompt", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def refuse_unsupported(self) -> None:
        """ApiError for what would be ignored, and changes the answer."""
        super().refuse_unsupported()
        if self.echo and self.logprobs is not None:
            message = "echo: found it with logprobs, which are told of new tokens only; expected one of both"
            raise ApiError(400, message, "echo")
        if self.best_of is not None and self.best_of != self.n:
            raise ApiError(400, f"best_of: found {self.best_of}, expected n, which is {self.n}", "best_of")


class ChatBody(Body):
    """Request to ``/v1/chat/completions``."""

    # Texts of conversations are as long as the context without a limit, and templates write special tokens themselves.
    changes = {**CHANGES, "n_predict": (-1,), "num_predict": (-1,), "add_special_tokens": (True, False)}
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the template besides the conversation.

        Raises
        ------
        ApiError
            If a name is one that the server gives a value itself.
        """
        values = self.chat_template_kwargs or {}
        if "messages" in values:
            message = "chat_template_kwargs: found 'messages', expected the conversation beside it only"
            raise ApiError(400, message, "chat_template_kwargs")
        return values

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum number of tokens of the text."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """How many of the most probable tokens are told with each."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """ApiError for what would be ignored, and changes the answer."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: found it without logprobs, expected logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_tokens != self.max_answer_tokens:
            found = f"found {self.max_tokens} and {self.max_answer_tokens} as max_completion_tokens"
            raise ApiError(400, f"max_tokens: {found}, expected one of both", "max_tokens")


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) <= _DIGITS):
            raise ApiError(400, f"logit_bias: found {token!r}, expected the number of a token", "logit_bias")
    return {int(token): bias for token, bias in given.items()}
