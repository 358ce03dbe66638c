"""Simulated time of calls of a network whose consecutive parts are on different devices or hosts."""

from __future__ import annotations

from collections.abc import Sequence

from relax_hetero.frontend.auto.simulate import Task, simulate


def simulate_calls(
    stages: Sequence[float], transfers: Sequence[float], calls: int, in_flight: int = 1, cores: int | None = None
) -> float:
    """Time of calls of a network whose consecutive parts are on different devices or hosts.

    Parameters
    ----------
    stages : sequence of float
        Seconds of each part.
    transfers : sequence of float
        Seconds of each transfer: to the first part, between parts, and from the last one.
    calls, in_flight : int
        Number of calls, and maximum number under way.
    cores : int, optional
        Number of parts or transfers that are processed at the same time, if all are on one machine.
    """
    if len(transfers) != len(stages) + 1:
        raise ValueError(f"found {len(transfers)} transfers, expected {len(stages) + 1} of {len(stages)} stages")
    tasks: list[Task] = []
    shared = {} if cores is None else {"cores": 1}
    for call in range(calls):
        for number, seconds in enumerate(transfers):
            after = [len(tasks) - 1] if number else []
            if not number and call >= in_flight:
                after = [(call - in_flight + 1) * (2 * len(stages) + 1) - 1]
            tasks.append(Task(seconds, after, shared))
            if number < len(stages):
                tasks.append(Task(stages[number], [len(tasks) - 1], {**shared, str(number): 1}))
    return max(simulate(tasks, {"cores": cores or 1}))
