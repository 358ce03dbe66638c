"""Share of this machine's CPUs that other work takes while something is measured."""

from __future__ import annotations

import os
import time
from contextlib import suppress

_MIN_SECONDS = 0.05  # the system counts ticks of 0.01
_IDLE_FIELDS = (3, 4)  # columns of /proc/stat: idle, and waiting for input or output
_GUESTS = 8  # columns from here on are counted in earlier ones


class CpuWatch:
    """Watches the CPUs from its creation on."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _busy_seconds(), _own_seconds()

    def others(self) -> float:
        """Share of this process's CPUs that others have used since, including time stolen by other virtual machines.

        0 where the time was too short to tell, or the system does not say.
        """
        started, busy, own = self._begin
        seconds, now = time.perf_counter() - started, _busy_seconds()
        if seconds < _MIN_SECONDS or busy is None or now is None:
            return 0.0
        share = (now[0] - busy[0] - (_own_seconds() - own)) / (seconds * now[1])
        return min(1.0, max(0.0, share))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> tuple[float, int] | None:
    """Seconds that the CPUs which this process may use have worked, and how many they are."""
    with suppress(OSError, ValueError, AttributeError, IndexError):
        allowed = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        tick = os.sysconf("SC_CLK_TCK")
        ticks, count = 0, 0
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *columns = line.split()
                if name in allowed:
                    ticks += sum(int(text) for at, text in enumerate(columns[:_GUESTS]) if at not in _IDLE_FIELDS)
                    count += 1
        if count:
            return ticks / tick, count
    return None
