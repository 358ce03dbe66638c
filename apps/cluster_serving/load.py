"""Load on a service: each caller sends a request as soon as its last one is answered."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Send = Callable[[int], Awaitable[str]]
"""Sends the request of that number, and returns its outcome: "ok", or a few words that describe a failure."""


@dataclass
class Load:
    """Requests that were sent, and their outcomes.

    Attributes
    ----------
    endings : Counter of str
        Number of requests by outcome.
    latencies : list of float
        Seconds that each took.
    seconds : float
        Time from the first request to the last answer.
    """

    endings: Counter[str] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second that succeeded."""
        return self.endings["ok"] / self.seconds

    @property
    def lost(self) -> int:
        """Requests that failed."""
        return self.endings.total() - self.endings["ok"]

    def percentile(self, share: float) -> float:
        """The latency in seconds that this share of requests (0 to 1) did not exceed."""
        ordered = sorted(self.latencies)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def drive(send: Send, callers: int, goes_on: Callable[[], bool]) -> Load:
    """Send requests from some callers at once while `goes_on` returns true, and wait for all answers.

    Parameters
    ----------
    send : Send
        An exception counts as an outcome.
    callers : int
    goes_on : callable
        Called before each request.
    """
    load, number = Load(), 0

    async def caller() -> None:
        nonlocal number
        while goes_on():
            number += 1
            begin = time.perf_counter()
            try:
                ending = await send(number)
            except Exception as error:
                ending = f"{type(error).__name__}: {error}"[:200]
            load.latencies.append(time.perf_counter() - begin)
            load.endings[ending] += 1

    begin = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    load.seconds = time.perf_counter() - begin
    return load


def until(seconds: float) -> Callable[[], bool]:
    """A function that returns true for some seconds from now."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() < end
