"""Sequences of the cache that requests may begin with, because they have the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CacheError
from .model import Cache


@dataclass(frozen=True, eq=False)
class Prefix:
    """A sequence whose request has finished.

    Attributes
    ----------
    slot : int
        In the cache.
    tokens : np.ndarray
        (length,) int32.
    """

    slot: int
    tokens: np.ndarray


class Prefixes:
    """Sequences of finished requests, kept for requests that begin alike.

    Parameters
    ----------
    cache : Cache
        Their keys and values.
    max_prefixes : int
        How many are kept; the one that was not used for the longest time goes first.
    min_tokens : int
        A beginning of fewer tokens is not worth a copy of a page.
    """

    def __init__(self, cache: Cache, max_prefixes: int, min_tokens: int = 16) -> None:
        self._cache, self._max_prefixes, self._min_tokens = cache, max_prefixes, min_tokens
        self._entries: deque[Prefix] = deque()  # the last was used last

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences that are kept."""
        return sum(prefix.tokens.size for prefix in self._entries)

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Keep the first `tokens` of a sequence, or free it if they are of no use; free others that it continues."""
        mine = np.asarray(tokens, np.int32)
        if self._max_prefixes == 0 or mine.size < self._min_tokens or not self._cut(slot, mine.size):
            self._cache.free(slot)
            return
        for prefix in [old for old in self._entries if common_length(old.tokens, mine) == old.tokens.size]:
            self._drop(prefix)
        while len(self._entries) >= self._max_prefixes:
            self.drop_oldest()
        self._entries.append(Prefix(slot, mine))

    def drop_oldest(self, excluded: Prefix | None = None) -> bool:
        """Free the sequence that was not used for the longest time, other than `excluded`; False if there is none."""
        oldest = next((prefix for prefix in self._entries if prefix is not excluded), None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def longest(self, tokens: np.ndarray, others: Iterable[Prefix] = ()) -> tuple[Prefix, int] | None:
        """The sequence that begins like `tokens` for the longest, and how long; None if none does for long enough.

        Parameters
        ----------
        tokens : np.ndarray
            (length,) int32.
        others : iterable of Prefix
            Sequences of requests that still run.
        """
        best = max(
            ((prefix, common_length(prefix.tokens, tokens)) for prefix in (*self._entries, *others)),
            key=_length,
            default=None,
        )
        if best is None or best[1] < self._min_tokens:
            return None
        return best

    def begin(self, prefix: Prefix, length: int) -> int | None:
        """The slot of a new sequence of the first `length` tokens.

        Other kept sequences are freed where there is no room for it; with none of them left, the new sequence takes
        the place of the one that it begins like.

        Returns
        -------
        int or None
            None if the sequence cannot be cut to that length, as its window has moved on.

        Raises
        ------
        CacheError
            If there is no room for one more.
        """
        while True:
            try:
                slot = self._cache.fork(prefix.slot)
                break
            except CacheError:
                if self.drop_oldest(excluded=prefix):
                    continue
                if prefix not in self._entries:
                    raise
                return self._borrowed(prefix, length)
        if not self._cut(slot, length):
            self._cache.free(slot)
            return None
        if prefix in self._entries:
            self._entries.remove(prefix)
            self._entries.append(prefix)
        return slot

    def _borrowed(self, prefix: Prefix, length: int) -> int | None:
        if not self._cut(prefix.slot, length):
            return None
        self._entries.remove(prefix)
        return prefix.slot

    def _cut(self, slot: int, length: int) -> bool:
        """Forget a slot's tokens after the first `length`; False if that is not possible."""
        try:
            if length < self._cache.length(slot):
                self._cache.cut(slot, length)
        except CacheError:
            return False
        return True

    def _drop(self, prefix: Prefix) -> None:
        self._entries.remove(prefix)
        self._cache.free(prefix.slot)


def common_length(one: np.ndarray, other: np.ndarray) -> int:
    """With how many equal tokens two texts begin."""
    length = min(one.size, other.size)
    different = one[:length] != other[:length]
    return int(np.argmax(different)) if different.any() else length


def _length(entry: tuple[Prefix, int]) -> int:
    return entry[1]
