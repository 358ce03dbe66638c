"""Waiting for results of a compiled graph without taking a core all the time.

Ray reads a channel by looking at it again and again: a thread that waits there takes a core, on a small machine one
that a host computes on. On two cores, BERT over two hosts then has half of the throughput.
So whoever waits sleeps first, for most of the time that this function's results have been apart lately.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MAX_INTERVALS = 8
_SLEEP_FRACTION = 0.9
"""Fraction of the shortest time between recent results to sleep. Where calls become shorter, one comes a tenth earlier
than expected, and the next sleep is as much shorter."""
_MIN_SLEEP_SECONDS = 0.0005
"""Seconds that are worth a sleep, where other calls are under way."""
_MIN_LONE_SLEEP_SECONDS = 0.01
"""Seconds that are worth a sleep to a caller who waits for one call: on a core that slept, a call of 1 ms takes 2."""


class Backoff:
    """When results of each function are to be expected. One thread uses it at a time.

    Parameters
    ----------
    pause : callable
        Sleeps for some seconds, or less where nobody waits any more.
    """

    def __init__(self, pause: Callable[[float], object]) -> None:
        self._pause = pause
        self._intervals: dict[str, deque[float]] = {}
        self._last = 0.0

    def sleep(self, name: str, sent_at: float, is_alone: bool) -> None:
        """Sleep for most of the time until the next result is expected.

        Parameters
        ----------
        name : str
            The function.
        sent_at : float
            When its call was sent (``time.monotonic``).
        is_alone : bool
            Whether no other call is under way, so that nothing but this call's time matters.
        """
        intervals = self._intervals.get(name)
        if intervals:
            left = max(sent_at, self._last) + _SLEEP_FRACTION * min(intervals) - time.monotonic()
            if left > (_MIN_LONE_SLEEP_SECONDS if is_alone else _MIN_SLEEP_SECONDS):
                self._pause(left)

    def note(self, name: str, sent_at: float) -> None:
        """A result has come."""
        now = time.monotonic()
        self._intervals.setdefault(name, deque(maxlen=_MAX_INTERVALS)).append(now - max(sent_at, self._last))
        self._last = now
