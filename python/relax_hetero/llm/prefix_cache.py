"""Prefix cache: sequences of finished requests, which requests with the same first tokens continue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import CacheError
from .model import Cache


@dataclass(frozen=True, eq=False)
class Prefix:
    """A sequence whose request has finished."""

    slot: int  # slot in the cache
    tokens: np.ndarray  # (length,) of int32


class PrefixCache:
    """Sequences of finished requests, evicted in least-recently-used order.

    `cache`: cache with their keys and values; `max_prefixes`: maximum number of sequences; `min_tokens`: minimum length
    of a common prefix, as a shorter one is not worth copying a page.
    """

    def __init__(self, cache: Cache, max_prefixes: int, min_tokens: int = 16) -> None:
        self._cache, self._max_prefixes, self._min_tokens = cache, max_prefixes, min_tokens
        self._entries: deque[Prefix] = deque()  # in order of use, most recent last

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(prefix.tokens.size for prefix in self._entries)

    def store(self, slot: int, tokens: Sequence[int]) -> None:
        """Store a sequence, truncated to `tokens`, in place of its stored prefixes; free it if it is too short."""
        new_tokens = np.asarray(tokens, np.int32)
        if self._max_prefixes == 0 or new_tokens.size < self._min_tokens or not self._truncate(slot, new_tokens.size):
            self._cache.free(slot)
            return
        for entry in [entry for entry in self._entries if common_length(entry.tokens, new_tokens) == entry.tokens.size]:
            self._evict(entry)
        while len(self._entries) >= self._max_prefixes:
            self.evict_oldest()
        self._entries.append(Prefix(slot, new_tokens))

    def evict_oldest(self, excluded: Prefix | None = None) -> bool:
        """Free the least recently used sequence other than `excluded`; False if there is none."""
        oldest = next((prefix for prefix in self._entries if prefix is not excluded), None)
        if oldest is None:
            return False
        self._evict(oldest)
        return True

    def find_longest(self, tokens: np.ndarray, candidates: Iterable[Prefix] = ()) -> tuple[Prefix, int] | None:
        """Find the sequence with the longest common prefix, and its length; None if all are shorter than `min_tokens`.

        `tokens`: tokens of a request, ``(length,)`` int32; `candidates`: further candidates, such as running requests.
        """
        best = max(
            ((prefix, common_length(prefix.tokens, tokens)) for prefix in (*self._entries, *candidates)),
            key=lambda match: match[1],
            default=None,
        )
        return None if best is None or best[1] < self._min_tokens else best

    def begin(self, prefix: Prefix, length: int) -> int | None:
        """Begin a sequence with the first `length` tokens of a prefix, and return its slot.

        Other stored sequences are evicted if the cache is full; if there are none, the new sequence takes the prefix's
        own slot. Returns None if the prefix cannot be truncated to that length, since pages have left its window.
        Raises CacheError if the cache is full.
        """
        while True:
            try:
                slot = self._cache.fork(prefix.slot)
                break
            except CacheError:
                if self.evict_oldest(excluded=prefix):
                    continue
                if prefix not in self._entries:
                    raise
                return self._reuse_slot(prefix, length)
        if not self._truncate(slot, length):
            self._cache.free(slot)
            return None
        if prefix in self._entries:
            self._entries.remove(prefix)
            self._entries.append(prefix)
        return slot

    def _reuse_slot(self, prefix: Prefix, length: int) -> int | None:
        if not self._truncate(prefix.slot, length):
            return None
        self._entries.remove(prefix)
        return prefix.slot

    def _truncate(self, slot: int, length: int) -> bool:
        """Remove a slot's tokens after the first `length`; False if that is not possible."""
        try:
            if length < self._cache.length(slot):
                self._cache.truncate(slot, length)
        except CacheError:
            return False
        return True

    def _evict(self, prefix: Prefix) -> None:
        self._entries.remove(prefix)
        self._cache.free(prefix.slot)


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common prefix of two sequences."""
    length = min(first.size, second.size)
    different = first[:length] != second[:length]
    return int(np.argmax(different)) if different.any() else length
