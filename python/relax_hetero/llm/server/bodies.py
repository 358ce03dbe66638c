"""Request bodies of the endpoints, checked by pydantic."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from ..errors import RequestError
from ..params import SamplingParams
from ..structured_output import FORMS, StructuredOutputs
from .api_errors import ApiError
from .chat_messages import Message
from .fields import NEUTRAL_STREAM_VALUES, NEUTRAL_VALUES, refuse_unsupported_fields
from .tools import Tool, ToolChoice, ToolUse

_MAX_TOKEN_ID_DIGITS = 9


def _or(default: Any) -> BeforeValidator:
    """Validator that replaces null by a default."""
    return BeforeValidator(lambda value: default if value is None else value)


_Switch = Annotated[bool, _or(False)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: _Switch = False


_SCALARS = {name: kind for name, kind in get_type_hints(SamplingParams).items() if kind in (bool, int, float)}
"""Types of sampling parameters that are fields of bodies by the same name, those of OpenAI and of vLLM."""

_FORM_BY_FIELD = {
    **dict.fromkeys(("guided_json", "json_schema"), "json"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    **dict.fromkeys(("guided_choice", "choices"), "choice"),
    **dict.fromkeys(("guided_grammar", "grammar", "ebnf"), "grammar"),
}
"""Forms of structured output by their fields in vLLM, SGLang and llama.cpp."""

_SamplingFields: Any = create_model(
    "_SamplingFields",
    __config__=ConfigDict(strict=True, extra="allow"),
    **{name: (kind | None, None) for name, kind in _SCALARS.items()},  # type: ignore[call-overload]
    **{name: (Any, None) for name in (*_FORM_BY_FIELD, "response_format", "structured_outputs")},
)


class Body(_SamplingFields):  # type: ignore[misc]
    """Fields of both endpoints. Others are refused if they would change the answer (`fields`), else ignored."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_VALUES
    model: str | None = None
    stream: _Switch = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, _or(1), Field(ge=1)] = 1
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _merge_extra_body(cls, body: Any) -> Any:
        """Merge fields of ``extra_body`` into the body, as the OpenAI clients do."""
        extra = body.get("extra_body") if isinstance(body, dict) else None
        return {**body, "extra_body": None, **extra} if isinstance(extra, dict) else body

    def refuse_unsupported(self) -> None:
        """Raise ApiError for unsupported fields that would change the answer."""
        refuse_unsupported_fields(self.model_extra or {}, self.neutral_values)
        if self.stream_options is not None:
            refuse_unsupported_fields(self.stream_options.model_extra or {}, NEUTRAL_STREAM_VALUES, "stream_options.")

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def may_have_form(self) -> bool:
        """True if the text may have a form, which may take a second to compile."""
        return any(getattr(self, name) for name in (*_FORM_BY_FIELD, "response_format", "structured_outputs"))

    @property
    def form(self) -> StructuredOutputs | None:
        """Form of the text, if one of the fields asks for it.

        Raises RequestError if several do, or one is malformed.
        """
        forms = [
            StructuredOutputs(**{form: value}, location=name)
            for name, form in _FORM_BY_FIELD.items()
            if (value := getattr(self, name)) not in (None, "")
        ]
        if self.structured_outputs is not None:
            forms.append(_parse_structured_outputs(self.structured_outputs))
        if self.response_format not in (None, {"type": "text"}):
            forms.append(_parse_response_format(self.response_format))
        if len(forms) > 1:
            raise RequestError(f"{forms[0].location}: found also {forms[1].location}, expected one of them")
        return forms[0] if forms else None

    def params(
        self, choice: int, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, float]
    ) -> SamplingParams:
        """Sampling parameters of one of the `n` choices; each has a seed of its own, and others than `defaults`.

        Raises RequestError if a value is out of range.
        """
        values = {name: getattr(self, name) for name in _SCALARS}
        if values["top_k"] == -1:  # vLLM's value for all tokens
            values["top_k"] = 0
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            **{**defaults, **{name: value for name, value in values.items() if value is not None}},
            logit_bias=_parse_logit_bias(self.logit_bias or {}),
            seed=None if self.seed is None else self.seed + choice,
            stop=tuple(stops),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            structured_outputs=self.form,
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
        """Prompts of the request, each a text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt: found an empty list, expected at least one prompt", "prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def params(
        self, choice: int, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, float]
    ) -> SamplingParams:
        """See `Body`; with ``echo``, the tokens of the prompt have log-probabilities, too."""
        params = super().params(choice, max_tokens, logprobs, defaults)
        return replace(params, prompt_logprobs=logprobs) if self.echo else params

    def refuse_unsupported(self) -> None:
        """Raise ApiError for unsupported fields that would change the answer."""
        super().refuse_unsupported()
        if self.best_of is not None and self.best_of != self.n:
            raise ApiError(400, f"best_of: found {self.best_of}, expected n, which is {self.n}", "best_of")


class ChatBody(Body):
    """Request to ``/v1/chat/completions``."""

    # Without a limit, answers are as long as the context; templates write special tokens themselves.
    neutral_values = {**NEUTRAL_VALUES, "n_predict": (-1,), "num_predict": (-1,), "add_special_tokens": (True, False)}
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, _or(True)] = True
    reasoning_format: Literal["none", "auto", "deepseek"] | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def may_have_form(self) -> bool:
        """See `Body`; calls of tools may have a form, too."""
        is_strict = any(tool.function.strict for tool in self.tools or ())
        return super().may_have_form or is_strict or self.tool_choice not in (None, "none", "auto")

    @property
    def tool_use(self) -> ToolUse:
        """Tools of the request. Raises ApiError if they contradict each other."""
        return ToolUse.from_fields(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def answer_tools(self) -> ToolUse:
        """Tools that the answer may call: none if it has a form.

        Raises ApiError if it must have a form and be a call.
        """
        form = self.form
        if form is None:
            return self.tool_use
        if self.tool_use.forced:
            found = f"found it with {form.location}, which forbids calls"
            raise ApiError(400, f"tool_choice: {found}, expected one of them", "tool_choice")
        return ToolUse()

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message, which is the assistant's."""
        last = self.messages[-1]
        texts = [part.text or "" for part in last.content] if isinstance(last.content, list) else [last.content or ""]
        has_text = bool("".join(texts).strip())
        may = last.role == "assistant" and has_text and not (last.model_extra or {}).get("tool_calls")
        if self.continue_final_message and (self.add_generation_prompt or not may):
            found = "add_generation_prompt" if self.add_generation_prompt else f"a last message of role {last.role!r}"
            expected = "expected a text of role 'assistant', and no add_generation_prompt"
            raise ApiError(400, f"continue_final_message: found {found}, {expected}", "continue_final_message")
        return may and self.continue_final_message is not False and not self.add_generation_prompt

    @property
    def template_values(self) -> dict[str, Any]:
        """Further values for the template. Raises ApiError if they contain ``messages``."""
        values = {**self.template_switches, **(self.chat_template_kwargs or {})}
        if "messages" in values:
            message = "chat_template_kwargs: found 'messages', expected them in the body only"
            raise ApiError(400, message, "chat_template_kwargs")
        return values

    @property
    def template_switches(self) -> dict[str, Any]:
        """Fields that are values for the template, if it knows them."""
        switches = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        return {name: value for name, value in switches.items() if value is not None}

    @property
    def max_answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """Number of most probable tokens to return with each token."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_unsupported(self) -> None:
        """Raise ApiError for unsupported fields that would change the answer."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs: found it without logprobs, expected logprobs: true", "top_logprobs")
        if self.max_tokens is not None and self.max_tokens != self.max_answer_tokens:
            found = f"found {self.max_tokens} and {self.max_answer_tokens} as max_completion_tokens"
            raise ApiError(400, f"max_tokens: {found}, expected one of them", "max_tokens")


class TokenizeBody(ChatBody):
    """Request to ``/tokenize``: one of a prompt (vLLM), a content (llama.cpp) and messages."""

    messages: list[Message] | None = Field(None, min_length=1)  # type: ignore[assignment]
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: Annotated[bool, _or(True)] = True
    add_special: _Switch = False
    parse_special: Annotated[bool, _or(True)] = True
    return_token_strs: _Switch = False
    with_pieces: _Switch = False

    def check(self) -> None:
        """Raise ApiError unless there is one text to encode."""
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise ApiError(400, f"prompt: found {found}, expected one of prompt, content and messages", "prompt")

    @property
    def text(self) -> str:
        """Text to encode, if there are no messages."""
        return (self.prompt if self.content is None else self.content) or ""

    @property
    def adds_special(self) -> bool:
        """True if the tokens for the beginning of a text are added."""
        return self.add_special_tokens if self.content is None else self.add_special


class DetokenizeBody(BaseModel):
    """Request to ``/detokenize``."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


def _parse_structured_outputs(value: Any) -> StructuredOutputs:
    """Parse vLLM's field of this name."""
    if not isinstance(value, dict) or not value.keys() <= FORMS.keys():
        found = f"found {json.dumps(value):.100}, expected an object with one of {', '.join(FORMS)}"
        raise RequestError(f"structured_outputs: {found}")
    return StructuredOutputs(**value)


def _parse_response_format(value: Any) -> StructuredOutputs:
    """Parse OpenAI's field; llama.cpp's ``json_object`` may have a ``schema``."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "json_object":
        schema = value.get("schema")
        form: dict[str, Any] = {"json_object": True} if schema is None else {"json": schema}
        return StructuredOutputs(**form, location="response_format")
    outer = value.get("json_schema") if kind == "json_schema" else None
    schema = outer.get("schema") if isinstance(outer, dict) else None
    if not isinstance(schema, dict):
        expected = 'expected {"type": "text"}, {"type": "json_object"} or one of type json_schema with a schema'
        raise RequestError(f"response_format: found {json.dumps(value):.100}, {expected}")
    return StructuredOutputs(json=schema, location="response_format")


def _parse_logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) <= _MAX_TOKEN_ID_DIGITS):
            raise ApiError(400, f"logit_bias: found {token!r}, expected a token id", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}
