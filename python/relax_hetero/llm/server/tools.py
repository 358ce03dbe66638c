"""Tools of a conversation, and the parts of its answers: reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..answer_parts import AnswerParser, Reasoning
from ..call_formats import (
    FORMATS,
    CallFormat,
    LarkWriter,
    format_named,
    format_of_template,
    parse_text,
    reasoning_of_template,
)
from ..chat_template import ChatTemplate
from ..structured_output import StructuredOutputs, package_errors
from .api_errors import ApiError

_MAX_TOOLS = 128


class Function(BaseModel):
    """Function of a tool."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """Tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(BaseModel):
    """Name of a function."""

    name: str


class ToolChoice(BaseModel):
    """Choice of one tool."""

    type: Literal["function"]
    function: NamedFunction


@dataclass(frozen=True)
class ToolUse:
    """Tools of one request."""

    tools: Sequence[Tool] = ()  # tools that the template shows; none if the model must not call any
    forced: bool = False  # whether the answer has to be a call
    several: bool = True  # whether an answer may have several calls
    name: str | None = None  # name of the tool that has to be called; None for any

    @classmethod
    def from_fields(cls, tools: Sequence[Tool] | None, choice: str | ToolChoice | None, several: bool) -> ToolUse:
        """Combine the fields of a body.

        `tools`: field ``tools``; `choice`: field ``tool_choice``; `several`: field ``parallel_tool_calls``. Raises
        ApiError if they contradict each other.
        """
        names = [tool.function.name for tool in tools or ()]
        if len(names) > _MAX_TOOLS:
            raise ApiError(400, f"tools: found {len(names)}, expected at most {_MAX_TOOLS}", "tools")
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ApiError(400, f"tools: found {duplicate!r} twice, expected unique names", "tools")
        if choice == "none" or not (names or choice in ("required",) or isinstance(choice, ToolChoice)):
            return cls()
        name = choice.function.name if isinstance(choice, ToolChoice) else None
        if not names or (name is not None and name not in names):
            found = f"found {name or choice!r} and the tools {names}"
            raise ApiError(400, f"tool_choice: {found}, expected it among the tools", "tool_choice")
        return cls(tools or (), choice == "required" or name is not None, several and name is None, name)

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schemas of the arguments, by name."""
        return {tool.function.name: tool.function.parameters or {"type": "object"} for tool in self.tools}

    @property
    def template_values(self) -> dict[str, Any]:
        """Values for the chat template."""
        return {"tools": [tool.model_dump(exclude_unset=True) for tool in self.tools]} if self.tools else {}


class AnswerFormats:
    """Format of the answers of one model. Raises HeteroError if there is no format of this name."""

    def __init__(
        self,
        template: ChatTemplate,  # chat template, which has the format
        control: Mapping[str, int],  # control tokens of the model
        call_format: str | None = None,  # name of the format of calls; by default it is known from the template
    ) -> None:
        # Format of calls, if it is known.
        self.calls = format_of_template(template.source) if call_format is None else format_named(call_format)
        self.control = control
        own = self.calls.reasoning if self.calls is not None else None
        # Texts around reasoning, if answers may have one.
        self.reasoning = own or reasoning_of_template(template.source)
        # Whether `calls` parses reasoning and text, too, so that it is needed without tools.
        self.parses_always = own is not None
        self._shows_tools = "tools" in template.source
        seen = (*(self.calls.control if self.calls else ()), *(self.reasoning or ()))
        self.visible_tokens = tuple(name for name in seen if name in control)  # as for `SamplingParams`

    def check(self, use: ToolUse) -> None:
        """Raise ApiError if the model cannot use tools."""
        if use.tools and not self._shows_tools:
            raise ApiError(400, "tools: the model's chat template leaves them out", "tools")
        if use.tools and self.calls is None:
            names = ", ".join(row.name for row in FORMATS)
            found = f"found none of the formats {names} in the model's chat template"
            raise ApiError(400, f"tools: {found}, expected one, or the server's option --tool-format", "tools")

    def answers(
        self,
        use: ToolUse,  # tools of the request
        prompt: str,
        continued: str | None = None,  # text of the message that the answer continues
        splits_reasoning: bool = True,  # whether reasoning is apart from the text of an answer
    ) -> Answers:
        """Format of the answers to one prompt.

        Raises ApiError if a text is to be continued by a call, in a format with marks around both.
        """
        reasoning, end, is_open = self.reasoning, prompt[-256:].rstrip(), False
        if reasoning is not None and not self.parses_always:
            if continued is None:
                is_open = end.endswith(reasoning.begin)
            else:
                is_open = continued.rfind(reasoning.begin) > continued.rfind(reasoning.end)
            if end.endswith(reasoning.end) or (continued is not None and not is_open):
                reasoning = None
        continues_text = continued is not None and self.parses_always
        if continues_text and use.forced:
            raise ApiError(400, "tool_choice: found a text to continue, which a call cannot be", "tool_choice")
        return Answers(self, use, None if continues_text else reasoning, is_open, splits_reasoning, continues_text)


@dataclass(frozen=True)
class Answers:
    """Format of the answers to one prompt."""

    formats: AnswerFormats  # format of the model's answers
    use: ToolUse  # tools of the request
    reasoning: Reasoning | None  # texts around the reasoning, if answers may have one
    is_reasoning: bool  # whether the prompt has begun the reasoning
    splits_reasoning: bool  # whether reasoning is apart from the text of an answer
    continues_text: bool  # whether the prompt has begun the text, in a format with marks around it

    def messages(self) -> AnswerMessages:
        """Messages of one answer."""
        formats, use = self.formats, self.use
        row = formats.calls if use.tools or formats.parses_always else None
        reasoning = self.reasoning if self.splits_reasoning and not formats.parses_always else None
        parse = parse_text if row is None else row.parse
        parser = AnswerParser(parse, reasoning, self.is_reasoning, use.schemas, None if use.several else 1)
        if row is not None and self.continues_text:
            parser.feed(row.content)  # the prompt has the mark of the text
        return AnswerMessages(parser, row, self.splits_reasoning)

    def form(self, form: StructuredOutputs | None) -> StructuredOutputs | None:
        """Form of an answer: calls if they are forced, else `form`, else calls of strict tools that the model begins.

        `form`: form that the request asks for.
        """
        formats, use = self.formats, self.use
        content = "" if formats.calls is None or self.continues_text else formats.calls.content
        row, is_free = formats.calls, not use.forced
        is_strict = form is None and any(tool.function.strict for tool in use.tools)
        if row is not None and (use.forced or (is_strict and row.trigger)):
            tools = {name: schema for name, schema in use.schemas.items() if use.name in (None, name)}
            for tool in use.tools if is_free else ():
                if not tool.function.strict:
                    tools[tool.function.name] = {"type": "object"}
            with package_errors("tools"):
                grammar, content = row.grammar(tools, use.several, formats.control, is_free), ""
            form = StructuredOutputs(grammar=grammar, location="tools")
        if form is None:
            return None
        prefix = LarkWriter(formats.control).before_answer(self.reasoning, self.is_reasoning, content)
        return replace(form, prefix=prefix)


class AnswerMessages:
    """Messages and deltas in OpenAI's form, made of the parts of one answer.

    `parser`: parser of the answer; `row`: format of calls, None if there cannot be any; `splits_reasoning`: whether
    reasoning is apart from the text.
    """

    def __init__(self, parser: AnswerParser, row: CallFormat | None, splits_reasoning: bool = True) -> None:
        self._parser, self._row, self._splits_reasoning = parser, row, splits_reasoning
        self.calls = 0

    def delta(self, text: str, is_end: bool) -> dict[str, Any]:
        """Growth of the message after more text, which may be the last.

        `text`: text to append to the answer; `is_end`: whether the answer is complete.
        """
        parts = self._parser.feed(text) + (self._parser.finish() if is_end else [])
        delta: dict[str, Any] = {}
        for kind, text in parts:
            if kind == "content" or (kind == "reasoning" and not self._splits_reasoning):
                delta["content"] = delta.get("content", "") + text
            elif kind == "reasoning":
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            else:
                self._add_call(delta.setdefault("tool_calls", []), kind == "call", text)
        return delta

    def _add_call(self, calls: list[dict[str, Any]], begins: bool, text: str) -> None:
        if begins and self._row is not None:
            function = {"name": text, "arguments": ""}
            calls.append({"index": self.calls, "id": self._row.new_id(), "type": "function", "function": function})
            self.calls += 1
            return
        if not calls:
            calls.append({"index": self.calls - 1, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += text

    def message(self, text: str) -> dict[str, Any]:
        """Message of a complete answer."""
        delta = self.delta(text, True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        return {"role": "assistant", "content": None if self.calls else "", **delta}
