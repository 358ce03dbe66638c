"""Timing of programs with thread pools of their own, in turns in one process."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

# Timed seconds of a program per turn, and maximum number of its calls.
SLICE_SECONDS = 0.02
MAX_CALLS = 200
# A slower program gets no untimed call before its turn, and two turns in all.
SLOW_SECONDS = 0.5
SLOW_TURNS = 2
_PRIORITY = 5  # of `real_time`, 1 to 99
# Idle threads of a pool spin for some milliseconds before they sleep.
_IDLE_STEP, _IDLE_LIMIT, _IDLE_SHARE = 0.002, 0.25, 0.2


@dataclass
class Timing:
    """The timed calls of one program, in seconds.

    Attributes
    ----------
    seconds : list of float
    restless : int
        Number of turns after which the process was still computing a quarter of a second later.
    """

    seconds: list[float] = field(default_factory=list)
    restless: int = 0
    turns: int = 0

    @property
    def median(self) -> float:
        """The median call."""
        return statistics.median(self.seconds)

    @property
    def fastest(self) -> float:
        """The fastest call."""
        return min(self.seconds)


def take_turns(calls: Mapping[str, Callable[[], object]], rounds: int, seed: int = 0) -> dict[str, Timing]:
    """Time every program for a slice per round, in a new random order.

    In a turn a program is called untimed until its caches and threads are warm, then timed call by call;
    the next turn waits until all threads of the process sleep.

    Parameters
    ----------
    calls : mapping of str to callable
        Programs by name; each has been called before.
    rounds : int
        Number of turns of each program.
    seed : int
        Seed of the orders.

    Returns
    -------
    dict of str to Timing
    """
    timings = {name: Timing() for name in calls}
    order, shuffle = list(calls), random.Random(seed)
    collected = gc.isenabled()
    gc.disable()
    try:
        wait_until_idle()
        for _ in range(rounds):
            shuffle.shuffle(order)
            for name in order:
                timing = timings[name]
                take_turn(calls[name], timing)
    finally:
        if collected:
            gc.enable()
    return timings


@contextmanager
def real_time(is_on: bool = True) -> Iterator[None]:
    """Run all threads of this process before those of other programs, which needs privileges; for seconds only."""
    if not is_on:
        yield
        return
    _schedule(os.SCHED_RR, _PRIORITY)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for task in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(int(task), policy, os.sched_param(priority))


def wait_until_idle() -> bool:
    """Sleep until this process uses no processor time; False if it still does after a quarter of a second."""
    end = time.perf_counter() + _IDLE_LIMIT
    while time.perf_counter() < end:
        before = time.process_time(), time.perf_counter()
        time.sleep(_IDLE_STEP)
        if time.process_time() - before[0] < _IDLE_SHARE * (time.perf_counter() - before[1]):
            return True
    return False


def take_turn(
    call: Callable[[], object],
    timing: Timing,
    slice_seconds: float = SLICE_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run one turn of a program and wait until idle; does nothing for a slow program that has had its turns.

    Parameters
    ----------
    call : callable
    timing : Timing
        Receives the seconds of each timed call.
    slice_seconds : float
        Duration of the timed calls.
    clock : callable
        Seconds: the wall's, or `time.process_time` for calls on one thread beside other programs.
    """
    if timing.turns < SLOW_TURNS or timing.fastest < SLOW_SECONDS:
        _take_turn(call, timing, slice_seconds, clock)
        timing.restless += not wait_until_idle()


def _take_turn(call: Callable[[], object], timing: Timing, slice_seconds: float, clock: Callable[[], float]) -> None:
    timing.turns += 1
    begin = clock()
    if not timing.seconds or timing.fastest < SLOW_SECONDS:
        for _ in range(3):
            call()
            if clock() - begin > slice_seconds / 4:
                break
    begin = end = clock()
    for _ in range(MAX_CALLS):
        start = clock()
        call()
        end = clock()
        timing.seconds.append(end - start)
        if end - begin > slice_seconds:
            break
