"""A text as it grows by tokens: only whole characters come out, and nothing that may belong to a stop string."""

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
        Whole characters, perhaps none.
    tokens : tuple of int
        Those that are told with this text. One whose characters are held back comes with a later delta.
    logprobs : tuple of TokenLogprob
        One for each token, where they were asked for.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class TextStream:
    """Makes text of tokens.

    Parameters
    ----------
    piece : callable
        The bytes of a token.
    stops : tuple of str
        Strings before which the text ends.

    Attributes
    ----------
    stopped : bool
        Whether a stop string came.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: tuple[str, ...] = ()) -> None:
        self._piece, self._stops = piece, stops
        # Bytes that are no UTF-8 become U+FFFD, as models may write anything.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._begin = 0  # characters before `_held`
        self._waiting: list[tuple[int, int, TokenLogprob | None]] = []  # where a token's text begins, and the token
        self.stopped = False

    def add(self, token: int, logprob: TokenLogprob | None = None, silent: bool = False) -> Delta:
        """The text goes on with `token`, whose own characters do not show where it is `silent`."""
        self._waiting.append((self._begin + len(self._pending), token, logprob))
        return self._grow("" if silent else self._decoder.decode(self._piece(token)))

    def finish(self) -> Delta:
        """Text that was held back, at the end; bytes of a character that never became whole as U+FFFD."""
        delta = self._grow(self._decoder.decode(b"", True))
        if self.stopped:
            return delta
        return _joined(delta, self._take(len(self._pending), everything=True))

    def _grow(self, text: str) -> Delta:
        if self.stopped:
            return Delta("", ())
        self._pending += text
        found = [at for at in (self._pending.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            return self._take(min(found))
        return self._take(len(self._pending) - self._may_be_stop())

    def _may_be_stop(self) -> int:
        """How many of the last characters may be the begin of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _take(self, count: int, everything: bool = False) -> Delta:
        """The first `count` characters that are held, and the tokens that begin before their end."""
        text, self._pending = self._pending[:count], self._pending[count:]
        self._begin += count
        told = [entry for entry in self._waiting if everything or entry[0] < self._begin]
        self._waiting = self._waiting[len(told) :]
        return Delta(text, tuple(entry[1] for entry in told), tuple(e[2] for e in told if e[2] is not None))


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(first.text + second.text, first.tokens + second.tokens, first.logprobs + second.logprobs)
