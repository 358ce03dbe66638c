"""Prompt look-up: the last tokens of a text occurred before, so what followed them may follow again."""

from __future__ import annotations

from collections.abc import Mapping

from .sequence import Sequence

_NGRAM = 3  # number of last tokens to look up
_MAX_INDEXED = 1 << 14  # number of last tokens of a prompt that are indexed, which take about 150 bytes each


class _Index:
    """Places of the n-grams of a growing list of tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._after: dict[tuple[int, ...], int] = {}  # offset after the last occurrence of each n-gram
        self._indexed = max(_NGRAM, len(tokens) - _MAX_INDEXED)

    def find(self) -> int | None:
        """Offset after the last earlier occurrence of the last tokens."""
        tokens = self._tokens
        for end in range(self._indexed, len(tokens)):
            self._after[tuple(tokens[end - _NGRAM : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        return self._after.get(tuple(tokens[-_NGRAM:])) if len(tokens) > _NGRAM else None


class PromptLookup:
    """Proposer of the tokens that followed the last ones before."""

    name = "lookup"

    def __init__(self) -> None:
        self._indices: dict[Sequence, _Index] = {}

    def limit(self, text: Sequence) -> int:
        """See `Proposer`: a draft that reaches the end follows itself."""
        return 0 if self._find(text) is None else text.remaining

    def seconds(self, text: Sequence, texts: int, length: int) -> tuple[float, float]:
        """See `Proposer`."""
        return 0.0, 0.0

    def draft(self, lengths: Mapping[Sequence, int]) -> Mapping[Sequence, list[int]]:
        """See `Proposer`."""
        drafts = {}
        for text, length in lengths.items():
            begin = self._find(text)
            if begin is not None:
                period = text.tokens[begin:]
                drafts[text] = [period[index % len(period)] for index in range(length)]
        return drafts

    def release(self, text: Sequence) -> None:
        """See `Proposer`."""
        self._indices.pop(text, None)

    def close(self) -> None:
        """See `Proposer`."""

    def _find(self, text: Sequence) -> int | None:
        if text not in self._indices:
            self._indices[text] = _Index(text.tokens)
        return self._indices[text].find()
