"""Tokens whose names in a text stand for themselves."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that no text should have, by which parts of texts are marked."""


class Prompt(str):
    """A text, parts of which users wrote: names of control tokens that have such a part are text.

    Methods of `str` return ordinary texts, without marks.

    Attributes
    ----------
    marks : sequence of int
        Places, in order. A name with one inside, or right behind its only character, is not the template's.
    """

    marks: Sequence[int]

    def __new__(cls, text: str, marks: Sequence[int]) -> Prompt:  # noqa: D102 - the class says it
        made = super().__new__(cls, text)
        made.marks = marks
        return made


class SpecialTokens:
    """Finds the names of tokens in a text; of two at one place the longer one.

    Parameters
    ----------
    tokens : mapping of str to int
        Token by name.
    control : collection of str
        Names that stand for their tokens in a `Prompt` only where its template wrote them.
    """

    def __init__(self, tokens: Mapping[str, int], control: Collection[str] = ()) -> None:
        self._tokens = {name: token for name, token in tokens.items() if name}
        self._control = frozenset(control)
        lengths: dict[str, set[int]] = {}
        for name in self._tokens:
            lengths.setdefault(name[0], set()).add(len(name))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text's parts in order: tokens, and the texts between them, none of which is empty."""
        begin = at = 0
        marks = text.marks if isinstance(text, Prompt) else array("Q")
        while self._first is not None and (match := self._first.search(text, at)) is not None:
            at = match.start()
            name = self._at(text, at, marks)
            if name is None:
                at += 1
                continue
            if begin < at:
                yield text[begin:at]
            yield self._tokens[name]
            begin = at = at + len(name)
        if begin < len(text):
            yield text[begin:]

    def _at(self, text: str, at: int, marks: Sequence[int]) -> str | None:
        """The name of a token that begins at a place."""
        after = bisect_right(marks, at)
        mark = marks[after] if after < len(marks) else len(text) + 1
        for length in self._lengths[text[at]]:
            name = text[at : at + length]
            if name in self._tokens and not (name in self._control and mark < at + max(2, length)):
                return name
        return None
