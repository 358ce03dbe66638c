"""Incremental parser of a model's answer: reasoning, text, and calls of tools.

Routines that parse are generators: they `yield` where they need more text, so that an answer has the same parts
whether it comes token by token or at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
Routine = Generator[None, None, T]
Sink = Callable[[str], None]

_BLANKS = re.compile(r"\s*")
_OPEN, _CLOSE = "{[", "}]"


class Part(NamedTuple):
    """Growth of an answer."""

    # ``content``, ``reasoning``, ``call`` (a call of the tool `text` begins) or ``arguments`` (of the last call).
    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str  # text to append


class Reader:
    """Text of an answer that was not parsed yet.

    `text`: text so far, from the last `release` on; `position`: offset of the next character to parse, to which
    routines return where their syntax does not match; `ended`: whether the answer is complete.
    """

    def __init__(self) -> None:
        self.text, self.position, self.ended = "", 0, False

    @property
    def rest(self) -> str:
        """Text from `position` on."""
        return self.text[self.position :]

    def release(self) -> None:
        """Forget text before `position`."""
        self.text, self.position = self.rest, 0

    def until(self, stops: Collection[str], sink: Sink | None = None) -> Routine[tuple[str, str]]:
        """Parse up to the first of several texts, and past it; return the text before, if without a sink, and the stop.

        At the end of the answer the stop is empty. `stops`: texts, none of which is the beginning of another; `sink`:
        function that gets the text before, as it comes.
        """
        parts: list[str] = []
        while True:
            found = [(offset, stop) for stop in stops if (offset := self.text.find(stop, self.position)) >= 0]
            begin, stop = min(found, default=(len(self.text), ""))
            if not stop and not self.ended:
                begin -= self._stop_prefix_length(stops)
            (sink or parts.append)(self.text[self.position : begin])
            self.position = begin + len(stop)
            if sink is not None:
                self.release()
            if stop or self.ended:
                return "".join(parts), stop
            yield

    def literal(self, text: str) -> Routine[bool]:
        """Parse blanks and a text; without the text, parse nothing and return False."""
        begin = _skip_blanks(self.text, self.position)
        while len(self.text) - begin < len(text) and not self.ended:
            if begin < len(self.text) and not text.startswith(self.text[begin:]):
                return False
            yield
            begin = _skip_blanks(self.text, self.position)
        if not self.text.startswith(text, begin):
            return False
        self.position = begin + len(text)
        return True

    def peek(self) -> Routine[str]:
        """Next character that is not a blank; empty at the end."""
        while (begin := _skip_blanks(self.text, self.position)) == len(self.text) and not self.ended:
            yield
        return self.text[begin : begin + 1]

    def json_text(self, sink: Sink | None = None) -> Routine[str]:
        """Parse a JSON value, and return its text, or pass it on as it comes.

        Only brackets and quotes are matched. At the end of the answer the text may be incomplete.
        """
        yield from self.peek()
        self.position = index = begin = _skip_blanks(self.text, self.position)
        depth, in_string, parts = 0, False, list[str]()
        while True:
            while index < len(self.text):
                character = self.text[index]
                if in_string:
                    if character == "\\" and index + 1 == len(self.text):
                        break
                    index += character == "\\"
                    in_string = character != '"'
                elif character in ",:}] \n\r\t" and depth == 0:
                    return self._take_json(begin, index, parts, sink)
                else:
                    in_string = character == '"'
                    depth += (character in _OPEN) - (character in _CLOSE)
                index += 1
                if depth == 0 and not in_string and character in '"}]':
                    return self._take_json(begin, index, parts, sink)
            if self.ended:
                return self._take_json(begin, len(self.text), parts, sink)
            if sink is not None:
                self._take_json(begin, index, parts, sink)
                self.release()
                begin = index = 0
            yield

    def _take_json(self, begin: int, end: int, parts: list[str], sink: Sink | None) -> str:
        (sink or parts.append)(self.text[begin:end])
        self.position = end
        return "".join(parts)

    def _stop_prefix_length(self, stops: Collection[str]) -> int:
        """Number of last characters that may begin a stop."""
        rest = self.text[max(self.position, len(self.text) - max(map(len, stops), default=0)) :]
        ends = (rest[-length:] for length in range(len(rest), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in stops)), 0)


def _skip_blanks(text: str, position: int) -> int:
    match = _BLANKS.match(text, position)
    assert match is not None
    return match.end()


class Reasoning(NamedTuple):
    """Texts around the reasoning at the beginning of an answer."""

    begin: str
    end: str


class AnswerParser:
    """Splits an answer into parts, as it comes."""

    def __init__(
        self,
        # Function that parses text after the reasoning, as `CallFormat.parse`.
        parse: Callable[[Reader, AnswerParser], Routine[None]],
        reasoning: Reasoning | None = None,  # texts around the reasoning, if the answer may have one
        is_reasoning: bool = False,  # whether the prompt has begun the reasoning
        tools: Mapping[str, Mapping[str, Any]] | None = None,  # JSON schemas of the tools' arguments, by name
        max_calls: int | None = None,  # number of calls after which further ones are left out
    ) -> None:
        self.tools = tools or {}
        self._max_calls = max_calls
        self._calls, self._has_name = 0, False
        self._parts: list[Part] = []
        self._blanks, self._strips = "", False
        self._reader = Reader()
        self._routine = self._parse(parse, reasoning, is_reasoning)
        next(self._routine)

    def feed(self, text: str) -> list[Part]:
        """Append text; return the growth of the answer's parts."""
        self._reader.text += text
        return self._run()

    def finish(self) -> list[Part]:
        """End the answer; return the rest of its parts."""
        self._reader.ended = True
        parts = self._run()
        return parts if self._calls or not self._blanks else [*parts, Part("content", self._blanks)]

    # Routines that parse call the methods below.

    def content(self, text: str) -> None:
        """Append to the text, without blanks around reasoning and calls."""
        if self._strips:
            text = text.lstrip()
        stripped = text.rstrip()
        if stripped:
            self._append(Part("content", self._blanks + stripped))
            self._blanks = text[len(stripped) :]
            self._strips = False
        else:
            self._blanks += text

    def reasoning(self, text: str) -> None:
        """Append to the reasoning."""
        self._append(Part("reasoning", text))

    def call(self, name: str) -> None:
        """Begin a call; the arguments of one without a name are text."""
        self._has_name = bool(name)
        if not name:
            return
        self._calls += 1
        self._blanks, self._strips = "", True
        self._append(Part("call", name))

    def arguments(self, text: str) -> None:
        """Append to the arguments of the last call."""
        if self._has_name:
            self._append(Part("arguments", text))
        else:
            self.content(text)

    def _append(self, part: Part) -> None:
        is_left_out = self._max_calls is not None and self._calls > self._max_calls
        if part.text and not (is_left_out and part.kind in ("call", "arguments")):
            self._parts.append(part)

    def _run(self) -> list[Part]:
        next(self._routine)
        parts, self._parts = self._parts, []
        return parts

    def _parse(
        self, parse: Callable[[Reader, AnswerParser], Routine[None]], reasoning: Reasoning | None, is_reasoning: bool
    ) -> Routine[None]:
        yield
        reader = self._reader
        if reasoning is not None and (is_reasoning or (yield from reader.literal(reasoning.begin))):
            yield from self._parse_reasoning(reader, reasoning)
        yield from parse(reader, self)
        while True:  # `feed` and `finish` need not know that the routine has ended
            yield

    def _parse_reasoning(self, reader: Reader, reasoning: Reasoning) -> Routine[None]:
        blanks, begins = "", True

        def sink(text: str) -> None:
            nonlocal blanks, begins
            text = blanks + text
            text = text.lstrip() if begins else text
            stripped = text.rstrip()
            blanks, begins = text[len(stripped) :], begins and not stripped
            self.reasoning(stripped)

        yield from reader.until((reasoning.end,), sink)
        self._strips = True


def call_object(reader: Reader, answer: AnswerParser, known_only: bool = False) -> Routine[bool]:
    """Parse a call ``{"name": ..., "arguments": {...}}``; return False, and parse nothing, if it is not one.

    `reader`: text to parse; `answer`: gets the call; `known_only`: whether an object with another name than a tool's is
    not a call.
    """
    begin, name, arguments, is_open = reader.position, None, "{}", False
    if not (yield from reader.literal("{")):
        return False
    while True:
        key = _loads((yield from reader.json_text()))
        if not isinstance(key, str) or not (yield from reader.literal(":")):
            break
        if key in ("arguments", "parameters") and name:
            is_open = True
            answer.call(name)
            yield from _parse_arguments(reader, answer)
        elif key in ("arguments", "parameters"):
            arguments = yield from reader.json_text()
        else:
            value = _loads((yield from reader.json_text()))
            name = value if key in ("name", "tool_name") and isinstance(value, str) else name
        if known_only and name and name not in answer.tools:
            break
        if (yield from reader.literal("}")):
            if name and not is_open:
                answer.call(name)
                answer.arguments(_unquote(arguments))
            if name:
                return True
            break
        if not (yield from reader.literal(",")):
            break
    if not is_open:
        reader.position = begin
    return is_open


def _parse_arguments(reader: Reader, answer: AnswerParser) -> Routine[None]:
    """Parse arguments; some models write them as a JSON string of JSON."""
    if (yield from reader.peek()) == '"':
        answer.arguments(_unquote((yield from reader.json_text())))
    else:
        yield from reader.json_text(answer.arguments)


def _unquote(text: str) -> str:
    value = _loads(text)
    return value if isinstance(value, str) else text


def _loads(text: str) -> Any:
    """Value of a JSON text; None if it is not one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
