"""Timing several programs against each other on a machine that is not quiet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# A program that takes longer than this per call gets no untimed call before each timed one.
WARM_BELOW_SECONDS = 1.0
# Timed calls of every program, however slow.
AT_LEAST = 2


@dataclass
class Timing:
    """The timed calls of one program, in seconds."""

    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0

    @property
    def median(self) -> float:
        """The median call; NaN without any."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def fastest(self) -> float:
        """The fastest call; NaN without any."""
        return min(self.seconds, default=float("nan"))


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    budget: float,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time every program once per round, so that a slow minute of the machine touches all alike.

    Parameters
    ----------
    calls
        Programs by name.
    rounds
        How many timed calls each gets.
    budget
        Seconds after which a program sits out the remaining rounds, once it has `AT_LEAST` timed calls.
    advance
        Told the program's name after each of its turns, taken or sat out.

    Returns
    -------
    dict of str to Timing
    """
    timings = {name: Timing() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            timing = timings[name]
            if timing.spent < budget or len(timing.seconds) < AT_LEAST:
                _take_turn(call, timing)
            advance(name)
    return timings


def _take_turn(call: Callable[[], object], timing: Timing) -> None:
    begun = time.perf_counter()
    # The untimed call brings back the caches and threads that the other programs' turns took away.
    if not timing.seconds or timing.fastest < WARM_BELOW_SECONDS:
        call()
    start = time.perf_counter()
    call()
    end = time.perf_counter()
    timing.seconds.append(end - start)
    timing.spent += end - begun
