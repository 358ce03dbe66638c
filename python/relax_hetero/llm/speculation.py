"""Speculative decoding: drafts of the next tokens, which one decode step with several rows of a sequence verifies.

Each row is sampled as if it were a step of its own, and rows after a wrong token are dropped: texts are those of single
steps, greedy or sampled, and only the number of steps changes. Proposers (`Proposer`) know what may follow; whether a
draft pays, and how long it should be, follows from measured times and from the share of tokens that were right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from .sequence import Sequence as Text

_SMOOTHING = 0.25  # weight of the latest value in averages of times
_TOKEN = 0.1  # weight of the latest token of a draft in its text's acceptance
_FORGETTING = 1 / 64  # weight of `_UNKNOWN` in the acceptance of drafts that do not pay, at each step without them
_UNKNOWN = 0.6  # acceptance of a proposer of which nothing is known
_MARGIN = 1.03  # minimum expected gain of a draft
_LOSS = 0.01  # fraction of the time of steps without drafts that drafts may lose
_MIN_CREDIT, _MAX_CREDIT = 1, 4  # steps that drafts may lose at first, and at most after they have paid
_ROW = 0.15  # time of a further row of a step, as a fraction of the step's, if it is not known
_NGRAM = 3  # number of last tokens to look up
_MAX_INDEXED = 1 << 14  # number of last tokens of a prompt that are indexed, which take about 150 bytes each
_HORIZON = 128  # maximum number of tokens over which the cost of a beginning is spread


class StepTimes:
    """Averages of the seconds that decode steps take, by number of rows rounded up to a power of two."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._begun: set[int] = set()

    def update(self, rows: int, seconds: float) -> None:
        """Record the time of a step, unless it is the first of its size, which also prepares others."""
        size = _size(rows)
        if size not in self._begun:
            self._begun.add(size)
            return
        average = self._seconds.get(size, seconds)
        # Few outliers: another process or a garbage collection can stop a step for long.
        self._seconds[size] = average + _SMOOTHING * (min(seconds, 2 * average) - average)

    def seconds(self, rows: int) -> float | None:
        """Average time of a step; None if unknown."""
        return self._seconds.get(_size(rows))

    def nearest(self, rows: int) -> float | None:
        """Average time of a step of the nearest size that is known; None if none is."""
        size = _size(rows)
        return self._seconds[min(self._seconds, key=lambda each: abs(each - size))] if self._seconds else None


def _size(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


class Proposer:
    """Source of drafts of several texts. `name`: name in statistics."""

    name: str

    def limit(self, text: Text) -> int:
        """Maximum number of tokens that it can draft now; 0 if it has none."""
        raise NotImplementedError

    def seconds(self, text: Text, texts: int, length: int) -> tuple[float, float]:
        """Time of a draft in a step, and that of its beginning, which later drafts save.

        `texts`, `length`: number of texts with drafts, and tokens of each.
        """
        return 0.0, 0.0

    def draft(self, lengths: Mapping[Text, int]) -> Mapping[Text, list[int]]:
        """Draft tokens, at most so many of each text as `lengths` say; texts may get fewer, or be missing."""
        raise NotImplementedError

    def release(self, text: Text) -> None:
        """Forget a text that has ended or was preempted, perhaps one that is not known."""

    def close(self) -> None:
        """Free what is kept of texts that have ended."""


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


class PromptLookup(Proposer):
    """Prompt look-up: the last tokens of a text occurred before, so what followed them may follow again."""

    name = "lookup"

    def __init__(self) -> None:
        self._indices: dict[Text, _Index] = {}

    def limit(self, text: Text) -> int:
        """See `Proposer`: a draft that reaches the end follows itself."""
        return 0 if self._find(text) is None else text.remaining

    def draft(self, lengths: Mapping[Text, int]) -> Mapping[Text, list[int]]:
        """See `Proposer`."""
        drafts = {}
        for text, length in lengths.items():
            begin = self._find(text)
            if begin is not None:
                period = text.tokens[begin:]
                drafts[text] = [period[index % len(period)] for index in range(length)]
        return drafts

    def release(self, text: Text) -> None:
        """See `Proposer`."""
        self._indices.pop(text, None)

    def _find(self, text: Text) -> int | None:
        if text not in self._indices:
            self._indices[text] = _Index(text.tokens)
        return self._indices[text].find()


class Speculation:
    """Chooses drafts that pay.

    A step with a draft has the value of as many steps without as it gives tokens. What drafts lose is bounded: they may
    use a credit of few steps' time, which grows by a fraction of the time of steps without drafts, and by what drafts
    gain. Proposers that lose are tried again as the credit grows. What a text costs before its first draft, such as the
    prefill of a draft model, is a debt, which both repay before the next text may begin. `proposers`: proposers, of
    which the most profitable one drafts for a text; `times`: times of steps; `drafted`, `accepted`: tokens of drafts so
    far, and those of them that were right.
    """

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self.times = StepTimes()
        self.drafted = self.accepted = 0
        self._proposers = proposers
        self._usual = {proposer.name: _UNKNOWN for proposer in proposers}  # acceptance of recent texts
        self._acceptance: dict[Text, dict[str, float]] = {}  # of each proposer's drafts
        self._credit: float | None = None
        self._debt = 0.0
        self._begun: set[tuple[Text, str]] = set()
        self._authors: dict[Text, str] = {}  # of the drafts of the current step
        self._seconds = 0.0  # that they took
        self._beginning_seconds = 0.0  # that beginnings took

    def draft(self, texts: Sequence[Text], limits: Sequence[int]) -> list[list[int]]:
        """Drafts of a decode step.

        `texts`: texts of the step; `limits`: maximum number of tokens of each text's draft.
        """
        lengths: dict[Proposer, dict[Text, int]] = {}
        for text, limit in zip(texts, limits, strict=True):
            proposer, length = self._best(text, limit, len(texts))
            if proposer is not None:
                lengths.setdefault(proposer, {})[text] = length
        drafts: dict[Text, list[int]] = {}
        self._seconds = self._beginning_seconds = 0.0
        self._authors = {}  # a step that ran out of pages has left some
        for proposer, own in lengths.items():
            begin = time.perf_counter()
            made = proposer.draft(own)
            seconds = time.perf_counter() - begin
            if len(made) == len(own):
                self._seconds += seconds
            else:
                self._beginning_seconds += seconds
            drafts |= made
            self._begun.update((text, proposer.name) for text in own)
            self._authors |= dict.fromkeys(made, proposer.name)
        return [drafts.get(text, []) for text in texts]

    def wants(self, texts: Sequence[Text], limit: int) -> bool:
        """Return whether a text would get a draft if it were decoded now.

        `texts`: texts of a step; `limit`: maximum number of tokens of a draft.
        """
        return any(self._best(text, limit, len(texts))[1] for text in texts)

    def update(self, texts: int, rows: int, seconds: float) -> None:
        """Record the time of a decode step; `accept` must follow for each draft.

        `texts`, `rows`: number of texts, and of rows with drafts; `seconds`: time since the last step, with that of the
        drafts.
        """
        usual = self.times.seconds(texts)
        seconds -= self._seconds + self._beginning_seconds
        self.times.update(rows, seconds)
        if usual is None:
            return
        if self._credit is None:
            self._credit = _MIN_CREDIT * usual
        self._debt += self._beginning_seconds
        if rows == texts and not self._seconds:
            self._earn(_LOSS * usual, usual)
        else:
            self._earn(usual - (self.times.seconds(rows) or seconds) - self._seconds, usual)
        self._seconds = self._beginning_seconds = 0.0

    def accept(self, text: Text, drafted: int, accepted: int, texts: int) -> None:
        """Record how many tokens of a draft were right.

        `text`: text of the draft; `drafted`, `accepted`: numbers of tokens; `texts`: number of texts of the step.
        """
        name, acceptances = self._authors.pop(text), self._acceptance.get(text, {})
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        # The first wrong token ends a draft: those behind it say nothing.
        tried = min(accepted + 1, drafted)
        share, weight = accepted / tried, 1 - (1 - _TOKEN) ** tried
        average = acceptances.get(name, self._usual[name])
        acceptances[name] = average + weight * (share - average)
        self._usual[name] += weight / 4 * (share - self._usual[name])
        usual = self.times.seconds(texts)
        if usual is not None:
            self._earn(accepted / texts * usual, usual)

    def release(self, text: Text) -> None:
        """Forget a text that has ended or was preempted."""
        self._acceptance.pop(text, None)  # `accept` of its last step still needs its author
        for proposer in self._proposers:
            self._begun.discard((text, proposer.name))
            proposer.release(text)

    def forget_times(self) -> None:
        """Measure again, since other functions compute steps from now on."""
        self.times, self._credit, self._debt = StepTimes(), None, 0.0

    def close(self) -> None:
        """Free what proposers keep."""
        for proposer in self._proposers:
            proposer.close()

    def _earn(self, seconds: float, usual: float) -> None:
        """Record seconds that drafts may lose, or negative ones that they have lost; `usual` is a step's time."""
        self._credit = min((self._credit or 0.0) + seconds, _MAX_CREDIT * usual)
        self._debt = max(self._debt - seconds, 0.0)

    def _best(self, text: Text, limit: int, texts: int) -> tuple[Proposer | None, int]:
        """Proposer and length of the draft that gains most; None and 0 if none pays."""
        usual = self.times.seconds(texts)
        if usual is None or limit < 1:
            return None, 0
        best: tuple[float, Proposer | None, int] = _MARGIN, None, 0
        has_credit = self._credit is None or self._credit > 0
        acceptances = self._acceptance.setdefault(text, {})
        for proposer in self._proposers:
            acceptance = acceptances.get(proposer.name, self._usual[proposer.name])
            available, tokens, found = min(limit, proposer.limit(text)), 1.0, False
            for length in range(1, available + 1):
                tokens += acceptance**length
                rows = texts * (length + 1)
                seconds, beginning = proposer.seconds(text, texts, length)
                seconds += self.times.seconds(rows) or usual * (1 + _ROW * length)
                seconds += beginning * tokens / min(text.remaining, _HORIZON)
                gain = tokens * usual / seconds
                found |= gain > _MARGIN
                may_begin = not beginning or not self._debt or (text, proposer.name) in self._begun
                if gain > best[0] and has_credit and may_begin:
                    best = gain, proposer, length
            if available > 0 and not found:
                acceptances[proposer.name] = acceptance + _FORGETTING * (_UNKNOWN - acceptance)
        return best[1:]
