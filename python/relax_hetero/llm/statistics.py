"""Statistics of an engine, for people and for monitors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Seconds over which speeds are means.
WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class Statistics:
    """A look at an engine.

    Attributes
    ----------
    waiting, running : int
        Requests without and with a slot.
    finished : dict of str to int
        Requests that ended, by reason.
    prompt_tokens : int
        Tokens that were prefilled.
    reused_tokens : int
        Tokens of prompts that were in the cache already.
    tokens : int
        Tokens that were written.
    preempted : int
        How often a request gave its pages to an older one.
    cached_tokens : int
        Tokens in the cache now.
    tokens_per_second : float
        Written, over the last ten seconds.
    ttft_seconds : float
        The mean of the last hundred requests that got one; 0 before there is any.
    """

    waiting: int
    running: int
    finished: dict[str, int]
    prompt_tokens: int
    reused_tokens: int
    tokens: int
    preempted: int
    cached_tokens: int
    tokens_per_second: float
    ttft_seconds: float


class Speed:
    """Tokens per second over the last seconds.

    Parameters
    ----------
    clock : callable
        Seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)])

    def see(self, total: int) -> None:
        """So many tokens were written in all by now."""
        now = self._clock()
        if now - self._seen[-1][0] < WINDOW_SECONDS / 100:  # a hundred points are enough
            return
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_SECONDS:
            self._seen.popleft()

    def mean(self, total: int) -> float:
        """Tokens per second, if `total` are written by now."""
        seen, now = list(self._seen), self._clock()
        begin, before = next((point for point in reversed(seen) if now - point[0] >= WINDOW_SECONDS), seen[0])
        return (total - before) / (now - begin) if now > begin else 0.0
