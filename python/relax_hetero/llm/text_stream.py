"""Incremental detokenizer: streams whole characters, and holds back text that may begin a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass

from .sampling import TokenLogprob


@dataclass(frozen=True)
class Delta:
    """Growth of a text.

    Attributes
    ----------
    text : str
        Whole characters; may be empty.
    tokens : tuple of int
        Tokens of this text. A token whose characters are held back comes with a later delta.
    logprobs : tuple of TokenLogprob
        Log-probabilities of the tokens, if requested.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class TextStream:
    """Turns tokens into text.

    `piece`: function that returns the bytes of a token; `stops`: strings before which the text ends; `stopped`: whether
    the text has ended at a stop string.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: tuple[str, ...] = ()) -> None:
        self._piece, self._stops = piece, stops
        # Invalid UTF-8 becomes U+FFFD: models may generate any bytes.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._begin = 0  # offset of `_pending` in the text
        self._pending_tokens: list[tuple[int, int, TokenLogprob | None]] = []  # (offset of its text, token, logprob)
        self.stopped = False

    def add(
        self, token: int, logprob: TokenLogprob | None = None, silent: bool = False, may_stop: bool = True
    ) -> Delta:
        """Append a token; a `silent` one adds no characters, and stop strings count only if the text `may_stop`."""
        self._pending_tokens.append((self._begin + len(self._pending), token, logprob))
        return self._grow("" if silent else self._decoder.decode(self._piece(token)), may_stop)

    def finish(self) -> Delta:
        """Return the rest of the text at its end; an incomplete character becomes U+FFFD."""
        delta = self._grow(self._decoder.decode(b"", True))
        return delta if self.stopped else _join(delta, self._take(len(self._pending), everything=True))

    def _grow(self, text: str, may_stop: bool = True) -> Delta:
        if self.stopped:
            return Delta("", ())
        self._pending += text
        if not may_stop:
            return self._take(len(self._pending))
        stops = [offset for offset in (self._pending.find(stop) for stop in self._stops) if offset >= 0]
        if stops:
            self.stopped = True
            return self._take(min(stops))
        return self._take(len(self._pending) - self._stop_prefix_length())

    def _stop_prefix_length(self) -> int:
        """Number of last characters that may begin a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take(self, count: int, everything: bool = False) -> Delta:
        """Release the first `count` pending characters, and the tokens that begin in them."""
        text, self._pending = self._pending[:count], self._pending[count:]
        self._begin += count
        released = [entry for entry in self._pending_tokens if everything or entry[0] < self._begin]
        self._pending_tokens = self._pending_tokens[len(released) :]
        return Delta(text, tuple(e[1] for e in released), tuple(e[2] for e in released if e[2] is not None))


def _join(first: Delta, second: Delta) -> Delta:
    return Delta(first.text + second.text, first.tokens + second.tokens, first.logprobs + second.logprobs)
