"""Simulation of work on shared resources: when each task ends, if resources serve tasks in the order they are ready.

A task takes units of some resources for a time: a device, the cores of a machine, a direction of a link. It starts when
all tasks before it have ended and all its units are free. Of ready tasks that wait for a resource, the one that was
ready first starts first, as in the library's queues.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """A unit of work."""

    seconds: float  # time from its start to its end
    after: Sequence[int] = ()  # positions of earlier tasks of the list that end before it starts
    # Resource -> number of its units that the task takes; none for a delay.
    units: Mapping[str, int] = field(default_factory=dict)


def simulate(tasks: Sequence[Task], resources: Mapping[str, int] | None = None) -> list[float]:
    """End of each task in seconds, from 0.

    `tasks`: each after those it waits for. `resources`: resource -> number of its units; 1 for others. Raises
    ValueError if a task waits for a later one, or takes more units than there are.
    """
    capacity = dict(resources or {})
    free = {name: capacity.get(name, 1) for task in tasks for name in task.units}
    waiting, readers = [len(task.after) for task in tasks], [list[int]() for _ in tasks]
    for number, task in enumerate(tasks):
        for name, units in task.units.items():
            if units > free[name]:
                raise ValueError(f"task {number} takes {units} units of {name!r}, which has {free[name]}")
        for before in task.after:
            if not 0 <= before < number:
                raise ValueError(f"task {number} is after task {before}; expected an earlier one")
            readers[before].append(number)
    ends = [0.0] * len(tasks)
    ready = [(0.0, number) for number, count in enumerate(waiting) if not count]
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        blocked: set[str] = set()
        left = []
        for since, number in sorted(ready):
            task = tasks[number]
            lacking = {name for name, units in task.units.items() if name in blocked or units > free[name]}
            if not lacking:
                for name, units in task.units.items():
                    free[name] -= units
                heapq.heappush(running, (now + task.seconds, number))
            else:
                blocked |= lacking  # not the rest, of which others may take free units
                left.append((since, number))
        ready = left
        now, _ = running[0]
        while running and running[0][0] == now:
            _, number = heapq.heappop(running)
            ends[number] = now
            for name, units in tasks[number].units.items():
                free[name] += units
            for reader in readers[number]:
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.append((now, reader))
    return ends
