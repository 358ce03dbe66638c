"""Messages of a conversation, and whether a model's template tells the model all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..chat_template import ChatTemplate
from ..errors import RequestError
from .api_errors import ApiError
from .fields import MESSAGE_CHANGES, is_neutral


class Part(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a conversation; other fields are given to the model's template."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: str = Field(min_length=1, max_length=64)
    content: str | list[Part] | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message with its text as one string.

        Parameters
        ----------
        where : str
            Where the message stands in the body, for errors.
        """
        content = self.content
        if isinstance(content, list):
            for index, part in enumerate(content):
                if part.type != "text" or part.text is None:
                    found = f"found a part of type {part.type!r}" + (" without text" if part.type == "text" else "")
                    raise ApiError(400, f"{where}.content.{index}: {found}, expected text", f"{where}.content.{index}")
            content = "".join(part.text or "" for part in content)
        # Clients send messages back as they got them: templates take fields that say nothing for tool calls.
        said = {
            name: value
            for name, value in (self.model_extra or {}).items()
            if value is not None and not (name in MESSAGE_CHANGES and is_neutral(name, value, MESSAGE_CHANGES))
        }
        return {**said, "role": self.role, "content": content or ""}


def rendered(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    """The prompt of a conversation.

    Parameters
    ----------
    template : ChatTemplate
    messages : sequence of mapping of str to object
        As `Message.plain` gives them.
    values : mapping of str to object
        Further values for the template.

    Raises
    ------
    RequestError
        If the template refuses the conversation.
    ApiError
        If the template leaves out a message, or a field or role of one that changes what is asked.
    """
    prompt = template.render(messages, **values)

    def check(place: str, others: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the conversation if it has the same prompt as another."""
        try:
            same = template.render(others, **values) == prompt
        except RequestError:
            return
        if same:
            raise ApiError(400, f"{place}: the model's chat template leaves it out", place.partition(":")[0])

    for name in MESSAGE_CHANGES:
        index = _first(not is_neutral(name, each.get(name), MESSAGE_CHANGES) for each in messages)
        if index is not None:
            without = [{key: value for key, value in each.items() if key != name} for each in messages]
            check(f"messages.{index}.{name}", without)
    index = _first(each["role"] == "tool" for each in messages)
    if index is not None:
        as_user = [{**each, "role": "user"} if each["role"] == "tool" else each for each in messages]
        check(f"messages.{index}.role: found 'tool'", as_user)
    for index in _missing(messages, prompt):
        place = f"messages.{index}.content: found a message of role {messages[index]['role']!r}"
        check(place, [*messages[:index], *messages[index + 1 :]])
    return prompt


def _missing(messages: Sequence[Mapping[str, Any]], prompt: str) -> list[int]:
    """The first message of each role whose text does not stand in the prompt, by their indices."""
    found, place = {}, 0
    for index, message in enumerate(messages):
        if message["role"] in found:
            continue
        text = message["content"].strip()
        at = prompt.find(text, place)  # they mostly come in their order, so that one pass finds all
        if at < 0 and text not in prompt:
            found[message["role"]] = index
        place = max(place, at)
    return list(found.values())


def _first(matches: Iterable[bool]) -> int | None:
    """The index of the first match; None without one."""
    return next((index for index, match in enumerate(matches) if match), None)
