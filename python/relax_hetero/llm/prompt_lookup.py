"""Speculative decoding by prompt look-up: the last tokens occurred before, so what followed them may follow again.

A draft is verified by one decode step with several rows of its sequence, each of which is sampled as if it were a step
of its own. So texts do not change; only the number of steps does.
"""

from __future__ import annotations

from collections.abc import Sequence

_NGRAM = 3
"""Number of last tokens to look up."""
_MAX_INDEXED = 1 << 14
"""Number of last tokens of a prompt that are indexed, which take about 150 bytes each."""
_LENGTHS = (1, 3, 7)
"""Lengths of drafts, so that rows with the token before are a power of two."""
_SMOOTHING = 0.25
"""Weight of the latest value in averages."""
_MIN_PAUSE, _MAX_PAUSE = 8, 256
"""Steps without drafts of a sequence whose drafts do not pay."""


class StepTimes:
    """Averages of the seconds that decode steps take, by number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def update(self, rows: int, seconds: float) -> None:
        """Record the time of a step.

        Parameters
        ----------
        rows : int
            Number of rows.
        seconds : float
            Time.
        """
        size = _size(rows)
        average = self._seconds.get(size, seconds)
        # Few outliers: another process or a garbage collection can stop a step for long.
        self._seconds[size] = average + _SMOOTHING * (min(seconds, 2 * average) - average)

    def ratio(self, rows: int, other: int) -> float:
        """Time of a step of `rows` by the time of one of `other` rows; 1 if either is unknown, so that it is tried.

        Parameters
        ----------
        rows, other : int
            Numbers of rows.
        """
        seconds, other_seconds = self._seconds.get(_size(rows)), self._seconds.get(_size(other))
        return seconds / other_seconds if seconds and other_seconds else 1.0


def _size(rows: int) -> int:
    """Number of rows rounded up to a power of two, as the functions' sizes usually are."""
    return 1 << (rows - 1).bit_length()


class PromptLookup:
    """Drafts of one sequence.

    Parameters
    ----------
    tokens : sequence of int
        Tokens of the sequence, which grow.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._after: dict[tuple[int, ...], int] = {}  # offset after the last occurrence of each n-gram
        self._indexed = max(_NGRAM, len(tokens) - _MAX_INDEXED)
        self._acceptance = 0.5
        self._pause = self._next_pause = 0

    def draft(self, rows: int, sequences: int, times: StepTimes) -> list[int]:
        """Tokens that may follow; none if none are known, or a step with them would not pay.

        Parameters
        ----------
        rows : int
            Maximum number of tokens.
        sequences : int
            Number of sequences of the step.
        times : StepTimes
            Times of steps.
        """
        begin = self._find()
        if begin is None or rows < 1:
            return []
        if self._pause:
            self._pause -= 1
            return []
        best, count = 1.0, 0
        for length in _LENGTHS:
            gain = self._expected(length) / times.ratio(sequences * (length + 1), sequences)
            if length <= rows and gain > best:
                best, count = gain, length
        if not count:
            self._next_pause = min(max(2 * self._next_pause, _MIN_PAUSE), _MAX_PAUSE)
            self._pause, self._acceptance = self._next_pause, (self._acceptance + 0.5) / 2
        draft: list[int] = []
        for index in range(begin, begin + count):  # past the end, the draft follows itself
            is_known = index < len(self._tokens)
            draft.append(self._tokens[index] if is_known else draft[index - len(self._tokens)])
        return draft

    def update(self, drafted: int, accepted: int) -> None:
        """Record how many tokens of a draft were right.

        Parameters
        ----------
        drafted, accepted : int
            Numbers of tokens.
        """
        # The first wrong token ends a draft: those behind it say nothing.
        tried = min(accepted + 1, drafted)
        self._acceptance += _SMOOTHING * (accepted / tried - self._acceptance)
        if accepted == drafted:
            self._next_pause = 0

    def _expected(self, length: int) -> float:
        """Expected number of tokens of a step with a draft."""
        return sum(self._acceptance**index for index in range(length + 1))

    def _find(self) -> int | None:
        """Offset after the last earlier occurrence of the last tokens."""
        tokens = self._tokens
        for end in range(self._indexed, len(tokens)):
            self._after[tuple(tokens[end - _NGRAM : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        return self._after.get(tuple(tokens[-_NGRAM:])) if len(tokens) > _NGRAM else None
