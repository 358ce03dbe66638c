"""Plans within limits of memory: as much of the program in a row as fits on a device, the rest on another.

Where a model does not fit on its fastest device, what matters is which part of it runs there. Transfers are paid at the
two ends of the part alone. Of all parts that fit and cannot be longer, those that spare most time are starting points
of the search, which moves single units on.
"""

from __future__ import annotations

from collections import Counter

from .plan_costs import PADDING, PlanCosts, call_ticks

_MAX_WINDOWS = 50


def best_window(costs: PlanCosts) -> list[list[int]]:
    """The best plan of this kind, in a list; none where no device has a limit, or no part fits."""
    found: list[list[int]] = []
    for limited in costs.limits:
        for other in range(costs.devices):
            if other != limited:
                found += _windows(costs, limited, other)
    return sorted(found, key=lambda plan: (costs.excess_bytes(plan), call_ticks(costs, plan)))[:1]


def _windows(costs: PlanCosts, limited: int, other: int) -> list[list[int]]:
    """Plans with a window on the limited device, those first that take most work from the other."""
    units = costs.graph.units
    room = costs.limits[limited] - costs.values_on(limited, [limited] * len(units))
    spared = [ticks[other] - ticks[limited] for ticks in costs.ops]
    readers: Counter[int] = Counter()  # of each constant, in the window
    begin, nbytes, gain = 0, 0.0, 0
    windows: list[tuple[int, int, int]] = []
    for end, unit in enumerate(units):
        gain += spared[end]
        for constant, size in unit.weights.items():
            readers[constant] += 1
            nbytes += size * PADDING if readers[constant] == 1 else 0.0
        while nbytes > room and begin <= end:
            gain -= spared[begin]
            for constant, size in units[begin].weights.items():
                readers[constant] -= 1
                nbytes -= size * PADDING if readers[constant] == 0 else 0.0
            begin += 1
        windows.append((gain, begin, end + 1))
    plans = []
    for gain, begin, end in sorted(windows, reverse=True)[:_MAX_WINDOWS]:
        if gain > 0:
            plans.append([limited if begin <= unit < end else other for unit in range(len(units))])
    return plans
