"""Special tokens in texts, and prompts in which text of users cannot become one."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence

from .model import TokenizerProtocol

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters, which no text should contain: markers of user text."""


class Prompt(str):
    """A rendered prompt that marks text of users, in which names of control tokens are plain text.

    Methods of `str` return ordinary texts, without marks.

    Attributes
    ----------
    marks : sequence of int
        Sorted offsets. A control token's name with a mark inside, or right after its only character, was written by a
        user.
    """

    marks: Sequence[int]

    def __new__(cls, text: str, marks: Sequence[int]) -> Prompt:  # noqa: D102 - the class says it
        prompt = super().__new__(cls, text)
        prompt.marks = marks
        return prompt


class SpecialTokens:
    """Splits texts at names of special tokens; the longest match wins.

    `tokens`: tokens by name; `control`: names that count in a `Prompt` only where its template wrote them.
    """

    def __init__(self, tokens: Mapping[str, int], control: Collection[str] = ()) -> None:
        self._tokens = {name: token for name, token in tokens.items() if name}
        self._control = frozenset(control)
        lengths: dict[str, set[int]] = {}
        for name in self._tokens:
            lengths.setdefault(name[0], set()).add(len(name))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        firsts = "".join(map(re.escape, sorted(lengths)))
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Iterate over tokens and the nonempty texts between them."""
        begin = offset = 0
        marks = text.marks if isinstance(text, Prompt) else array("Q")
        while self._first is not None and (match := self._first.search(text, offset)) is not None:
            offset = match.start()
            name = self._match_name(text, offset, marks)
            if name is None:
                offset += 1
                continue
            if begin < offset:
                yield text[begin:offset]
            yield self._tokens[name]
            begin = offset = offset + len(name)
        if begin < len(text):
            yield text[begin:]

    def _match_name(self, text: str, offset: int, marks: Sequence[int]) -> str | None:
        """Return the longest name of a token at an offset."""
        index = bisect_right(marks, offset)
        next_mark = marks[index] if index < len(marks) else len(text) + 1
        for length in self._lengths[text[offset]]:
            name = text[offset : offset + length]
            if name in self._tokens and not (name in self._control and next_mark < offset + max(2, length)):
                return name
        return None


def control_tokens(tokenizer: TokenizerProtocol) -> dict[str, int]:
    """Control tokens of a tokenizer by name; empty if it does not tell them.

    `tokenizer`: tokenizer, perhaps with `names` and `control_names` as `Tokenizer` has them.
    """
    control = getattr(tokenizer, "control_names", ())
    return {name: token for token, name in enumerate(getattr(tokenizer, "names", ())) if name in control}


def begin_and_end(tokenizer: TokenizerProtocol) -> dict[str, str]:
    """Names of the tokens for the beginning and the end of a text; empty if the tokenizer does not tell them.

    `tokenizer`: tokenizer, perhaps with `names` and `begin_id` as `Tokenizer` has them.
    """
    ids = {"bos_token": getattr(tokenizer, "begin_id", None), "eos_token": min(tokenizer.stop_ids, default=None)}
    names = getattr(tokenizer, "names", ())
    return {name: "" if token is None or token >= len(names) else names[token] for name, token in ids.items()}


class NamingTokenizer:
    """Tokenizer some of whose control tokens add their names to a text.

    `tokenizer`: tokenizer of the model; `visible`: names of these control tokens; `stop_ids`: tokens that end a text.
    """

    def __init__(self, tokenizer: TokenizerProtocol, visible: Collection[str]) -> None:
        self.stop_ids, self.encode, self._piece = tokenizer.stop_ids, tokenizer.encode, tokenizer.piece
        self._names = {token: name.encode() for name, token in control_tokens(tokenizer).items() if name in visible}

    def piece(self, token: int) -> bytes:
        """Bytes that a token adds to a text."""
        return self._names.get(token) or self._piece(token)
