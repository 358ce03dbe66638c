"""Costs of a plan, which gives every unit of a graph a device: the time of one call, and the work of each queue.

Ticks are whole numbers, so that a plan costs the same on every machine. `call_ticks` is the time of one call, in which
independent work overlaps; `CallTime` and `BusiestQueue` keep what a search minimizes up to date while units move.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from .cost_model import CostModel
from .work_graph import OUTSIDE, WorkGraph, WorkValue

TICKS = 1e12
"""Ticks in a second: picoseconds."""

PADDING = 1.02
"""Packed weights are padded to whole tiles."""

TRANSFORMED = 16 / 9
"""Winograd's form F(2x2, 3x3), which convolutions on CPUs may take, has 16 numbers for 9 of a window."""


class PlanCosts:
    """Costs of one graph under one model.

    `transforming` are the devices that may store windows of convolutions transformed: they take more memory there.

    A transfer is work of the queue that it goes to, as at run time; of the one that it comes from where it goes to an
    implicit host, which has no queue.

    Attributes
    ----------
    devices : int
        How many there are.
    queues
        How many queues they have.
    queue_of
        The queue of each device.
    ops : list
        Ticks of each unit on each device.
    around : list of list of int
        For each unit the values that it makes or reads, as positions in ``graph.values``.
    limits : dict
        The most bytes that a call may take, by device; none where all of the program fits.
    """

    def __init__(
        self,
        graph: WorkGraph,
        model: CostModel,
        limits: Mapping[int, int] | None = None,
        transforming: Collection[int] = (),
    ) -> None:
        self.graph = graph
        self._transforming = frozenset(transforming)
        self.devices = len(model.devices)
        self.queue_of = list(model.queues) or list(range(self.devices))
        self.queues = max(self.queue_of) + 1
        self.ops = [
            [sum(_ticks(model.op_seconds(work, device)) for work in unit.ops) for device in self._all()]
            for unit in graph.units
        ]
        self.around: list[list[int]] = [[] for _ in graph.units]
        for index, value in enumerate(graph.values):
            for unit in {value.maker, *value.readers} - {OUTSIDE}:
                self.around[unit].append(index)
        self._kept = _fused_values(graph)
        self._model = model
        readers = Counter(constant for unit in graph.units for constant in unit.weights)
        self._shared = {constant for constant, count in readers.items() if count > 1}
        self._own = [
            sum(size for constant, size in unit.weights.items() if constant not in self._shared) for unit in graph.units
        ]
        self._sharing = [index for index, unit in enumerate(graph.units) if not self._shared.isdisjoint(unit.weights)]
        everything = {device: self.bytes_on(device, [device] * len(graph.units)) for device in limits or ()}
        self.limits = {device: limit for device, limit in (limits or {}).items() if everything[device] > limit}

    def total(self, plan: Sequence[int]) -> int:
        """Ticks of all ops and transfers together."""
        return sum(self.busy(plan))

    def busy(self, plan: Sequence[int]) -> list[int]:
        """Ticks that each device works for one call."""
        ticks = [0] * self.devices
        for costs, device in zip(self.ops, plan, strict=True):
            ticks[device] += costs[device]
        for value in self.graph.values:
            for _, device, amount in self.transfers(value, plan):
                ticks[device] += amount
        return ticks

    def busy_queues(self, plan: Sequence[int]) -> list[int]:
        """Ticks that each queue works for one call."""
        ticks = [0] * self.queues
        for queue, amount in zip(self.queue_of, self.busy(plan), strict=True):
            ticks[queue] += amount
        return ticks

    def excess_bytes(self, plan: Sequence[int]) -> tuple[int, ...]:
        """Bytes of a plan beyond the limits, of all devices together; nothing where there are no limits."""
        if not self.limits:
            return ()
        return (sum(max(0, self.bytes_on(device, plan) - limit) for device, limit in self.limits.items()),)

    def bytes_on(self, device: int, plan: Sequence[int]) -> int:
        """Bytes that a call takes on a device: its weights, and the most of other values that it has at once."""
        weights = sum(size for size, place in zip(self._own, plan, strict=True) if place == device)
        shared: dict[int, float] = {}
        for unit in self._sharing:
            if plan[unit] == device:
                shared |= self.graph.units[unit].weights
        weights += sum(shared[constant] for constant in self._shared & shared.keys())
        if device in self._transforming:
            windows = sum(unit.windows for unit, place in zip(self.graph.units, plan, strict=True) if place == device)
            weights += windows * (TRANSFORMED - 1)
        return math.ceil(weights * PADDING) + self.values_on(device, plan)

    def values_on(self, device: int, plan: Sequence[int]) -> int:
        """The most bytes of inputs, results and values between units that a device has at once.

        Values that the kernel of their maker keeps in registers are none, and such a kernel's result is there as soon
        as it begins. Values that come from another device or go there lie apart from those that stay; feature maps
        among them are there in two orders of their dimensions for a moment.
        """
        end = len(plan)
        staying, crossing = ([0.0] * (end + 2) for _ in range(2))
        begins = list(range(end))
        for index in self._kept:
            value = self.graph.values[index]
            if plan[value.maker] == plan[value.readers[0]]:
                begins[value.readers[0]] = begins[value.maker]
        for index, value in enumerate(self.graph.values):
            if index in self._kept and plan[value.maker] == plan[value.readers[0]]:
                continue
            steps = [end if reader == OUTSIDE else reader for reader in value.readers]
            if self.where(value.maker, plan) == device:
                begin = begins[value.maker] if value.maker != OUTSIDE else 0
            else:
                there = [step for step in steps if self.where(OUTSIDE if step == end else step, plan) == device]
                if not there:
                    continue
                begin, steps = min(there), there
            places = {self.where(unit, plan) for unit in (value.maker, *value.readers)}
            change = staying if len(places) == 1 else crossing
            change[min(begin, end)] += value.size
            change[max(begin, *steps) + 1] -= value.size
            if len(places) > 1 and value.is_map and OUTSIDE not in (value.maker, *value.readers):
                change[min(begin, end)] += value.size
                change[min(begin, end) + 1] -= value.size
        return math.ceil(sum(max(itertools.accumulate(change)) for change in (staying, crossing)))

    def transfers(self, value: WorkValue, plan: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Where a value is taken, the device whose queue does it, and ticks; once for each place."""
        source = self.where(value.maker, plan)
        for destination in dict.fromkeys(self.where(reader, plan) for reader in value.readers):
            if destination != source:
                carrier = destination if destination >= 0 else source
                yield destination, carrier, self.transfer(value.size, source, destination)

    def where(self, unit: int, plan: Sequence[int]) -> int:
        """The device of a unit, or that of the caller."""
        return self._model.host if unit == OUTSIDE else plan[unit]

    def transfer(self, size: float, source: int, destination: int) -> int:
        """Ticks until that many bytes have gone from one device to another."""
        return _ticks(self._model.transfer_seconds(size, source, destination))

    def crossing(self, value: WorkValue) -> int:
        """Ticks of a transfer of a value between two devices, on average."""
        pairs = [(a, b) for a in self._all() for b in self._all() if a != b]
        return sum(self.transfer(value.size, a, b) for a, b in pairs) // max(len(pairs), 1)

    def _all(self) -> range:
        return range(self.devices)


def _fused_values(graph: WorkGraph) -> dict[int, None]:
    """The values that only a unit reads which joins their maker's kernel: of its operands the one that is made last.

    In the order of the program.
    """
    last: dict[int, int] = {}
    for index, value in enumerate(graph.values):
        for reader in value.readers:
            if value.maker != OUTSIDE and reader > value.maker:
                before = last.get(reader)
                if before is None or graph.values[before].maker <= value.maker:
                    last[reader] = index
    return {
        index: None
        for reader, index in sorted(last.items())
        if len(graph.values[index].readers) == 1
        and reader != OUTSIDE
        and graph.units[reader].ops
        and not any(work.is_kernel for work in graph.units[reader].ops)
    }


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def call_ticks(costs: PlanCosts, plan: Sequence[int]) -> int:
    """Ticks from the start of a call until all its ops and transfers are done, by a list schedule of them.

    A queue does one thing at a time: of the steps that are ready, the first in the program, where a transfer stands
    before its first reader. A unit is ready when all it reads is at hand, a transfer when its value is made. Never more
    than ``costs.total(plan)``, as some queue always works.

    A value that a unit before its maker reads, which is possible where a unit's bindings lie apart, is not waited for.
    """
    units = len(costs.graph.units)
    # Steps: the units, then the transfers. Of each its place in the program, its queue and ticks, how many it waits
    # for, and who waits for it.
    order = list(range(1, 2 * units, 2))
    queue_of = [costs.queue_of[device] for device in plan]
    ticks = [unit_ticks[device] for unit_ticks, device in zip(costs.ops, plan, strict=True)]
    waits = [0] * units
    followers: list[list[int]] = [[] for _ in range(units)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(costs.queues)]
    for value in costs.graph.values:
        maker, source = value.maker, costs.where(value.maker, plan)
        step_to: dict[int, int] = {}
        for destination, carrier, amount in costs.transfers(value, plan):
            step = step_to[destination] = len(ticks)
            at = (reader for reader in value.readers if costs.where(reader, plan) == destination and reader != OUTSIDE)
            order.append(2 * min(at, default=units))
            queue_of.append(costs.queue_of[carrier])
            ticks.append(amount)
            waits.append(0 if maker == OUTSIDE else 1)
            followers.append([])
            if maker != OUTSIDE:
                followers[maker].append(step)
        for reader in value.readers:
            if reader == OUTSIDE or reader <= maker:
                continue
            before = step_to.get(plan[reader], maker)
            if plan[reader] != source or maker != OUTSIDE:
                followers[before].append(reader)
                waits[reader] += 1
    for step, count in enumerate(waits):
        if count == 0:
            ready[queue_of[step]].append((order[step], step))
    for waiting in ready:
        heapq.heapify(waiting)
    return _run(order, queue_of, ticks, waits, followers, ready)


def _run(
    order: list[int],
    queue_of: list[int],
    ticks: list[int],
    waits: list[int],
    followers: list[list[int]],
    ready: list[list[tuple[int, int]]],
) -> int:
    """When the last step ends. `ready` holds a heap for each queue: places in the program and steps."""
    now = 0
    running: list[tuple[int, int]] = []  # until when, and which step
    free = [True] * len(ready)
    for queue, waiting in enumerate(ready):
        if waiting:
            step = heapq.heappop(waiting)[1]
            heapq.heappush(running, (ticks[step], step))
            free[queue] = False
    while running:
        now, done = heapq.heappop(running)
        free[queue_of[done]] = True
        touched = [queue_of[done]]
        for follower in followers[done]:
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready[queue_of[follower]], (order[follower], follower))
                touched.append(queue_of[follower])
        for queue in touched:
            if free[queue] and ready[queue]:
                step = heapq.heappop(ready[queue])[1]
                heapq.heappush(running, (now + ticks[step], step))
                free[queue] = False
    return now


class Measure(Protocol):
    """A plan that can be changed, and its cost.

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
    """The time of one call (`call_ticks`); of equal ones the least work. Plans within the limits come first."""

    def __init__(self, costs: PlanCosts, plan: Sequence[int]) -> None:
        self._costs = costs
        self.effort = 0
        self.plan = list(plan)
        self.key: tuple[int, ...] = ()
        self.move((), ())

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices."""
        self._put(units, devices)
        costs = self._costs
        self.key = (*costs.excess_bytes(self.plan), call_ticks(costs, self.plan), costs.total(self.plan))
        self.effort += (len(self.plan) + len(costs.graph.values)) * (1 + len(costs.limits))

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
    """How long the busiest queue works for one call, then the second, and so on. Plans within the limits come first."""

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
        if costs.limits:  # memory is counted over the whole program
            self.effort += len(self.plan) + len(costs.graph.values)

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
        return (*self._costs.excess_bytes(self.plan), *sorted(self._busy, reverse=True))
