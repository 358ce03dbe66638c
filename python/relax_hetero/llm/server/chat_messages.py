"""Chat messages, and the check that a chat template does not drop any of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..chat_template import ChatTemplate
from ..errors import RequestError
from ..special_tokens import NONCHARACTERS, Prompt
from .api_errors import ApiError
from .fields import NEUTRAL_MESSAGE_VALUES, is_neutral


class Part(BaseModel):
    """A content part of a message."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class Message(BaseModel):
    """A chat message; further fields are passed to the template."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str = Field(min_length=1, max_length=64)
    content: str | list[Part] | None = None

    def flatten(self, location: str) -> dict[str, Any]:
        """Return the message with its content as one string.

        `location`: location of the message in the body, for errors.
        """
        content = self.content
        if isinstance(content, list):
            for index, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    problem = f"found a part of type {part.type!r}" + (" without text" if part.type == "text" else "")
                    raise ApiError(
                        400, f"{location}.content.{index}: {problem}, expected text", f"{location}.content.{index}"
                    )
            content = "".join(part.text or "" for part in content)
        # Clients send answers back unchanged, and templates may take an empty `tool_calls` for a tool call.
        extra = {
            name: value
            for name, value in (self.model_extra or {}).items()
            if value is not None
            and not (name in NEUTRAL_MESSAGE_VALUES and is_neutral(name, value, NEUTRAL_MESSAGE_VALUES))
        }
        return {**extra, "role": self.role, "content": content or ""}


def render_chat(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    values: Mapping[str, Any],
    continues: bool = False,  # whether the prompt ends where the last message does
) -> str:
    """Render messages whose calls have arguments as OpenAI's clients write them, texts of JSON.

    Other arguments and errors are those of `render_checked`.
    """
    values = {**values, "add_generation_prompt": False} if continues else values
    first_error: RequestError | ApiError | None = None
    for variant in _variants(messages):
        try:
            prompt = render_checked(template, variant, values)
        except (RequestError, ApiError) as error:
            first_error = first_error or error
            continue
        if not any(repr(arguments) in prompt for arguments in _arguments_of(variant)):  # not JSON, but Python
            return _cut_after_last_text(template, variant, values, prompt) if continues else prompt
    raise first_error or ApiError(400, "messages: the model's chat template does not write calls as JSON", "messages")


def _variants(messages: Sequence[dict[str, Any]]) -> list[Sequence[dict[str, Any]]]:
    """Messages as templates may expect calls: arguments as values, or as texts; no content, or an empty one."""
    if not any(message.get("tool_calls") for message in messages):
        return [messages]
    parsed = [_parse_arguments(message) for message in messages]

    def without_content(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": None} if message.get("tool_calls") and not message["content"] else message

    return [parsed, messages, *([without_content(each) for each in variant] for variant in (parsed, messages))]


def _parse_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Message with the arguments of its calls as values, as most templates expect, and gpt-oss' name of reasoning."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    thoughts = {} if message["content"] else {"thinking": message.get("reasoning_content")}

    def parse(call: Any) -> Any:
        try:
            function = call["function"]
            arguments = json.loads(function["arguments"] or "{}")
        except (ValueError, TypeError, KeyError, RecursionError):
            return call
        return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call

    thoughts = {name: text for name, text in thoughts.items() if text}
    return {**thoughts, **message, "tool_calls": [parse(call) for call in calls]}


def _arguments_of(messages: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Arguments of calls that are values, and not the same text in Python and in JSON."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    functions = [call["function"] for call in calls if isinstance(call.get("function"), dict)]
    values = [function["arguments"] for function in functions if isinstance(function.get("arguments"), dict)]
    return [value for value in values if value and repr(value) != json.dumps(value, ensure_ascii=False)]


def _cut_after_last_text(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], values: Mapping[str, Any], prompt: str
) -> str:
    """Prompt up to the end of the last message's text, whose place another prompt shows.

    Raises ApiError if the template changes the text.
    """
    *others, last = messages
    text = last["content"].strip()
    mark = next(each for each in NONCHARACTERS if each not in prompt)
    marked = template.render([*others, {**last, "content": last["content"].replace(text, mark, 1)}], **values)
    begin = marked.rfind(mark) + (marked.count(mark) - 1) * (len(text) - 1)
    end = begin + len(text)
    if mark not in marked or not prompt.startswith(text, begin):
        message = "continue_final_message: the model's chat template changes the text of the last message"
        raise ApiError(400, message, "continue_final_message")
    return (
        Prompt(prompt[:end], [mark for mark in prompt.marks if mark <= end]) if isinstance(prompt, Prompt) else prompt
    )


def render_checked(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """Render messages, and check that all of them are in the prompt.

    `template`: chat template of the model; `messages`: results of `Message.flatten`; `values`: further values for the
    template. Raises RequestError if the template refuses the messages, and ApiError if the template drops a message, or
    a field or role that matters.
    """
    prompt = template.render(messages, **values)

    def refuse_if_unchanged(location: str, changed: Sequence[Mapping[str, Any]]) -> None:
        """Raise ApiError if changed messages have the same prompt."""
        try:
            same = template.render(changed, **values) == prompt
        except RequestError:
            return
        if same:
            raise ApiError(400, f"{location}: the model's chat template leaves it out", location.partition(":")[0])

    for name in NEUTRAL_MESSAGE_VALUES:
        index = _index_of_true(_matters(each, name) for each in messages)
        if index is not None:
            reduced = [{key: value for key, value in each.items() if key != name} for each in messages]
            refuse_if_unchanged(f"messages.{index}.{name}", reduced)
    index = _index_of_true(each["role"] == "tool" for each in messages)
    if index is not None:
        as_user = [{**each, "role": "user"} if each["role"] == "tool" else each for each in messages]
        refuse_if_unchanged(f"messages.{index}.role: found 'tool'", as_user)
    for index in _find_missing_texts(messages, prompt):
        location = f"messages.{index}.content: found a message of role {messages[index]['role']!r}"
        refuse_if_unchanged(location, [*messages[:index], *messages[index + 1 :]])
    return prompt


def _find_missing_texts(messages: Sequence[Mapping[str, Any]], prompt: str) -> list[int]:
    """Indices of messages whose text is not in the prompt, at most one (the first) for each role."""
    index_by_role, position = {}, 0
    for index, message in enumerate(messages):
        if message["role"] in index_by_role:
            continue
        text = (message["content"] or "").strip()
        begin = prompt.find(text, position)  # texts are usually in order, so that one pass finds all
        if begin < 0 and text not in prompt:
            index_by_role[message["role"]] = index
        position = max(position, begin)
    return list(index_by_role.values())


def _matters(message: Mapping[str, Any], name: str) -> bool:
    """True if a template must not drop a field; the name of a tool is that of the call before, too."""
    if name == "name" and message["role"] == "tool":
        return False
    return not is_neutral(name, message.get(name), NEUTRAL_MESSAGE_VALUES)


def _index_of_true(matches: Iterable[bool]) -> int | None:
    """Index of the first true element, if any."""
    return next((index for index, match in enumerate(matches) if match), None)
