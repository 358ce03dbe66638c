"""Tokens whose names in a text stand for themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class SpecialTokens:
    """Finds the names of tokens in a text; of two at one place the longer one.

    Parameters
    ----------
    tokens: Token by name.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {name: token for name, token in tokens.items() if name}
        lengths: dict[str, set[int]] = {}
        for name in self._tokens:
            lengths.setdefault(name[0], set()).add(len(name))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text's parts in order: tokens, and the texts between them, none of which is empty."""
        begin = at = 0
        while self._first is not None and (match := self._first.search(text, at)) is not None:
            at = match.start()
            name = self._at(text, at)
            if name is None:
                at += 1
                continue
            if begin < at:
                yield text[begin:at]
            yield self._tokens[name]
            begin = at = at + len(name)
        if begin < len(text):
            yield text[begin:]

    def _at(self, text: str, at: int) -> str | None:
        names = (text[at : at + length] for length in self._lengths[text[at]])
        return next((name for name in names if name in self._tokens), None)
