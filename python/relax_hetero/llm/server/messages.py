"""Chat messages, and the check that a chat template does not drop any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..chat_template import ChatTemplate
from ..errors import RequestError
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

        Parameters
        ----------
        location : str
            Location of the message in the body, for errors.
        """
        content = self.content
        if isinstance(content, list):
            for index, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    found = f"found a part of type {part.type!r}" + (" without text" if part.type == "text" else "")
                    raise ApiError(
                        400, f"{location}.content.{index}: {found}, expected text", f"{location}.content.{index}"
                    )
            content = "".join(part.text or "" for part in content)
        # Clients send answers back as they got them; templates would take an empty `tool_calls` for a tool call.
        extra = {
            name: value
            for name, value in (self.model_extra or {}).items()
            if value is not None
            and not (name in NEUTRAL_MESSAGE_VALUES and is_neutral(name, value, NEUTRAL_MESSAGE_VALUES))
        }
        return {**extra, "role": self.role, "content": content or ""}


def render_checked(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """Render messages, and check that all of them are in the prompt.

    Parameters
    ----------
    template : ChatTemplate
        Chat template of the model.
    messages : sequence of mapping of str to object
        Results of `Message.flatten`.
    values : mapping of str to object
        Further values for the template.

    Raises
    ------
    RequestError
        If the template refuses the messages.
    ApiError
        If the template drops a message, or a field or role that matters.
    """
    prompt = template.render(messages, **values)

    def check(location: str, changed: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the messages if changed ones have the same prompt."""
        try:
            same = template.render(changed, **values) == prompt
        except RequestError:
            return
        if same:
            raise ApiError(400, f"{location}: the model's chat template leaves it out", location.partition(":")[0])

    for name in NEUTRAL_MESSAGE_VALUES:
        index = _first(not is_neutral(name, each.get(name), NEUTRAL_MESSAGE_VALUES) for each in messages)
        if index is not None:
            without = [{key: value for key, value in each.items() if key != name} for each in messages]
            check(f"messages.{index}.{name}", without)
    index = _first(each["role"] == "tool" for each in messages)
    if index is not None:
        as_user = [{**each, "role": "user"} if each["role"] == "tool" else each for each in messages]
        check(f"messages.{index}.role: found 'tool'", as_user)
    for index in _missing(messages, prompt):
        location = f"messages.{index}.content: found a message of role {messages[index]['role']!r}"
        check(location, [*messages[:index], *messages[index + 1 :]])
    return prompt


def _missing(messages: Sequence[Mapping[str, Any]], prompt: str) -> list[int]:
    """Index of the first message of each role whose text is not in the prompt."""
    index_by_role, position = {}, 0
    for index, message in enumerate(messages):
        if message["role"] in index_by_role:
            continue
        text = message["content"].strip()
        begin = prompt.find(text, position)  # usually in order, so that one pass finds all
        if begin < 0 and text not in prompt:
            index_by_role[message["role"]] = index
        position = max(position, begin)
    return list(index_by_role.values())


def _first(matches: Iterable[bool]) -> int | None:
    """Index of the first true element, if any."""
    return next((index for index, match in enumerate(matches) if match), None)
