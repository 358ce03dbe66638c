"""What a search over plans minimizes, kept up to date while units move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .list_schedule import call_ticks
from .plan_costs import PlanCosts


class Measure(Protocol):
    """A plan that can be changed, and what it is worth.

    Attributes
    ----------
    plan : list of int
        A device for every unit; changed by the methods only.
    key : tuple of int
        Less is better.
    effort : int
        Units and values looked at so far.
    """

    plan: list[int]
    key: tuple[int, ...]
    effort: int

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices."""

    def improve(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices if that is better."""


class CallTime:
    """The time of one call (`call_ticks`); of equal ones the least work."""

    def __init__(self, costs: PlanCosts, plan: Sequence[int]) -> None:
        self._costs = costs
        self.effort = 0
        self.plan = list(plan)
        self.key: tuple[int, ...] = ()
        self.move((), ())

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices."""
        self._put(units, devices)
        self.key = call_ticks(self._costs, self.plan), self._costs.total(self.plan)
        self.effort += len(self.plan) + len(self._costs.graph.values)

    def improve(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices if that is better."""
        before, key = [self.plan[unit] for unit in units], self.key
        self.move(units, devices)
        if not self.key < key:
            self._put(units, before)
            self.key = key

    def _put(self, units: Sequence[int], devices: Sequence[int]) -> None:
        for unit, device in zip(units, devices, strict=True):
            self.plan[unit] = device


class BusiestQueue:
    """How long the busiest queue works for one call, then the second, and so on."""

    def __init__(self, costs: PlanCosts, plan: Sequence[int]) -> None:
        self._costs = costs
        self.effort = 0
        self.plan = list(plan)
        self._busy = costs.busy_queues(plan)
        self.key = self._sorted()

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices; looks at them and the values around them only."""
        costs = self._costs
        around = {value for unit in units for value in costs.around[unit]}
        self._add(units, around, -1)
        for unit, device in zip(units, devices, strict=True):
            self.plan[unit] = device
        self._add(units, around, 1)
        self.key = self._sorted()
        self.effort += len(units) + len(around)

    def improve(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices if that is better."""
        before, key = [self.plan[unit] for unit in units], self.key
        self.move(units, devices)
        if not self.key < key:
            self.move(units, before)

    def _add(self, units: Sequence[int], values: set[int], sign: int) -> None:
        costs = self._costs
        for unit in units:
            device = self.plan[unit]
            self._busy[costs.queue_of[device]] += sign * costs.ops[unit][device]
        for value in values:
            for _, device, amount in costs.transfers(costs.graph.values[value], self.plan):
                self._busy[costs.queue_of[device]] += sign * amount

    def _sorted(self) -> tuple[int, ...]:
        return tuple(sorted(self._busy, reverse=True))
