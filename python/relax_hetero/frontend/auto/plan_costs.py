"""Costs of a plan, which assigns every unit of a graph a device: makespan of one call, work of each queue, memory.

Times are integers (ticks), so that a plan costs the same on every machine. `CallTime` and `BusiestQueue` update the
objective of a search when units move.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from .cost_model import CostModel
from .work_graph import OUTSIDE, WorkGraph, WorkValue

TICKS = 1e12  # ticks per second
PADDING = 1.02  # factor of packed weights, which are padded to whole tiles

WINOGRAD_SIZE_RATIO = 16 / 9
"""Winograd's F(2x2, 3x3), which CPU convolutions may use, stores 16 numbers for a filter of 9."""


class PlanCosts:
    """Costs of plans of one graph under one cost model.

    Devices in `transforming` may store 3x3 filters in Winograd's form, which takes more memory.

    A transfer occupies the queue of its destination, as at run time, or of its source if it goes to an implicit host.
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
        self.devices = len(model.devices)  # number of devices
        self.queue_of = list(model.queues) or list(range(self.devices))  # the queue of each device
        self.queues = max(self.queue_of) + 1  # number of queues
        # Ticks of each unit on each device.
        self.ops = [
            [sum(_ticks(model.op_seconds(work, device)) for work in unit.ops) for device in self._device_range()]
            for unit in graph.units
        ]
        # For each unit, the indices in ``graph.values`` of the values that it writes or reads.
        self.around: list[list[int]] = [[] for _ in graph.units]
        for index, value in enumerate(graph.values):
            for unit in {value.producer, *value.readers} - {OUTSIDE}:
                self.around[unit].append(index)
        self._register_values = _fused_values(graph)
        self._model = model
        readers = Counter(constant for unit in graph.units for constant in unit.weights)
        self._shared = {constant for constant, count in readers.items() if count > 1}
        self._own_weights = [
            sum(size for constant, size in unit.weights.items() if constant not in self._shared) for unit in graph.units
        ]
        self._sharers = [index for index, unit in enumerate(graph.units) if not self._shared.isdisjoint(unit.weights)]
        all_on_device = {device: self.bytes_on(device, [device] * len(graph.units)) for device in limits or ()}
        # Device -> maximum bytes of a call; only devices on which the whole program does not fit.
        self.limits = {device: limit for device, limit in (limits or {}).items() if all_on_device[device] > limit}

    def total(self, plan: Sequence[int]) -> int:
        """Sum of the ticks of all ops and transfers."""
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
        """Sum of bytes beyond the limits, as a tuple that is empty without limits."""
        if not self.limits:
            return ()
        return (sum(max(0, self.bytes_on(device, plan) - limit) for device, limit in self.limits.items()),)

    def bytes_on(self, device: int, plan: Sequence[int]) -> int:
        """Bytes of a call on a device: weights, and the peak of other values."""
        weights = sum(size for size, target in zip(self._own_weights, plan, strict=True) if target == device)
        shared: dict[int, float] = {}
        for unit in self._sharers:
            if plan[unit] == device:
                shared |= self.graph.units[unit].weights
        weights += sum(shared[constant] for constant in self._shared & shared.keys())
        if device in self._transforming:
            windows = sum(unit.windows for unit, target in zip(self.graph.units, plan, strict=True) if target == device)
            weights += windows * (WINOGRAD_SIZE_RATIO - 1)
        return math.ceil(weights * PADDING) + self.values_on(device, plan)

    def values_on(self, device: int, plan: Sequence[int]) -> int:
        """Peak bytes of inputs, results and intermediate values on a device.

        Values that a fused kernel keeps in registers take no memory, and the result of such a kernel is allocated at
        its start. Transferred values are in a separate arena; feature maps among them exist in two layouts for a
        moment.
        """
        end = len(plan)
        staying, crossing = ([0.0] * (end + 2) for _ in range(2))
        starts = list(range(end))
        for index in self._register_values:
            value = self.graph.values[index]
            if plan[value.producer] == plan[value.readers[0]]:
                starts[value.readers[0]] = starts[value.producer]
        for index, value in enumerate(self.graph.values):
            if index in self._register_values and plan[value.producer] == plan[value.readers[0]]:
                continue
            steps = [end if reader == OUTSIDE else reader for reader in value.readers]
            if self.device_of(value.producer, plan) == device:
                start = starts[value.producer] if value.producer != OUTSIDE else 0
            else:
                pairs = zip(steps, value.readers, strict=True)
                local_steps = [step for step, reader in pairs if self.device_of(reader, plan) == device]
                if not local_steps:
                    continue
                start, steps = min(local_steps), local_steps
            devices = {self.device_of(unit, plan) for unit in (value.producer, *value.readers)}
            change = staying if len(devices) == 1 else crossing
            change[min(start, end)] += value.size
            change[max(start, *steps) + 1] -= value.size
            if len(devices) > 1 and value.is_map and OUTSIDE not in (value.producer, *value.readers):
                change[min(start, end)] += value.size
                change[min(start, end) + 1] -= value.size
        return math.ceil(sum(max(itertools.accumulate(change)) for change in (staying, crossing)))

    def transfers(self, value: WorkValue, plan: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Destination, carrying device and ticks of each transfer of a value."""
        source = self.device_of(value.producer, plan)
        for destination in dict.fromkeys(self.device_of(reader, plan) for reader in value.readers):
            if destination != source:
                carrier = destination if destination >= 0 else source
                yield destination, carrier, self.transfer(value.size, source, destination)

    def device_of(self, unit: int, plan: Sequence[int]) -> int:
        """The device of a unit, or the host for the caller."""
        return self._model.host if unit == OUTSIDE else plan[unit]

    def transfer(self, size: float, source: int, destination: int) -> int:
        """Ticks of a transfer."""
        return _ticks(self._model.transfer_seconds(size, source, destination))

    def mean_transfer(self, value: WorkValue) -> int:
        """Mean ticks of a transfer of a value between two devices."""
        pairs = [(a, b) for a in self._device_range() for b in self._device_range() if a != b]
        return sum(self.transfer(value.size, a, b) for a, b in pairs) // max(len(pairs), 1)

    def _device_range(self) -> range:
        return range(self.devices)


def _fused_values(graph: WorkGraph) -> dict[int, None]:
    """Values with a single reader that is fused into their kernel, which is that of the reader's last operand.

    In program order.
    """
    last_value: dict[int, int] = {}
    for index, value in enumerate(graph.values):
        for reader in value.readers:
            if value.producer != OUTSIDE and reader > value.producer:
                previous = last_value.get(reader)
                if previous is None or graph.values[previous].producer <= value.producer:
                    last_value[reader] = index
    return {
        index: None
        for reader, index in sorted(last_value.items())
        if len(graph.values[index].readers) == 1
        and reader != OUTSIDE
        and graph.units[reader].ops
        and not any(work.is_kernel for work in graph.units[reader].ops)
    }


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def call_ticks(costs: PlanCosts, plan: Sequence[int]) -> int:
    """Makespan of a call by list scheduling of its units and transfers.

    A queue runs one step at a time, of the ready steps the first in program order, where a transfer precedes its first
    reader. A unit is ready when all its operands are on its device, a transfer when its value is computed. The result
    is at most ``costs.total(plan)``, as some queue always works.

    A unit does not wait for a value of a later unit, which is possible if the bindings of a unit are not consecutive.
    """
    units = len(costs.graph.units)
    # Steps are the units, then the transfers, each with its priority, queue, ticks, number of pending predecessors, and
    # followers.
    order = list(range(1, 2 * units, 2))
    queue_of = [costs.queue_of[device] for device in plan]
    ticks = [unit_ticks[device] for unit_ticks, device in zip(costs.ops, plan, strict=True)]
    num_pending = [0] * units
    followers: list[list[int]] = [[] for _ in range(units)]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(costs.queues)]
    for value in costs.graph.values:
        producer, source = value.producer, costs.device_of(value.producer, plan)
        step_to: dict[int, int] = {}
        for destination, carrier, amount in costs.transfers(value, plan):
            step = step_to[destination] = len(ticks)
            readers = (reader for reader in value.readers if reader != OUTSIDE)
            local = (reader for reader in readers if costs.device_of(reader, plan) == destination)
            order.append(2 * min(local, default=units))
            queue_of.append(costs.queue_of[carrier])
            ticks.append(amount)
            num_pending.append(0 if producer == OUTSIDE else 1)
            followers.append([])
            if producer != OUTSIDE:
                followers[producer].append(step)
        for reader in value.readers:
            if reader == OUTSIDE or reader <= producer:
                continue
            predecessor = step_to.get(plan[reader], producer)
            if plan[reader] != source or producer != OUTSIDE:
                followers[predecessor].append(reader)
                num_pending[reader] += 1
    for step, count in enumerate(num_pending):
        if count == 0:
            ready[queue_of[step]].append((order[step], step))
    for heap in ready:
        heapq.heapify(heap)
    return _makespan(order, queue_of, ticks, num_pending, followers, ready)


def _makespan(
    order: list[int],
    queue_of: list[int],
    ticks: list[int],
    num_pending: list[int],
    followers: list[list[int]],
    ready: list[list[tuple[int, int]]],
) -> int:
    """End of the last step. `ready` has a heap of (priority, step) for each queue."""
    now = 0
    running_heap: list[tuple[int, int]] = []  # (end, step)
    free = [True] * len(ready)
    for queue, heap in enumerate(ready):
        if heap:
            step = heapq.heappop(heap)[1]
            heapq.heappush(running_heap, (ticks[step], step))
            free[queue] = False
    while running_heap:
        now, step_done = heapq.heappop(running_heap)
        free[queue_of[step_done]] = True
        affected = [queue_of[step_done]]
        for follower in followers[step_done]:
            num_pending[follower] -= 1
            if num_pending[follower] == 0:
                heapq.heappush(ready[queue_of[follower]], (order[follower], follower))
                affected.append(queue_of[follower])
        for queue in affected:
            if free[queue] and ready[queue]:
                step = heapq.heappop(ready[queue])[1]
                heapq.heappush(running_heap, (now + ticks[step], step))
                free[queue] = False
    return now


class Measure:
    """A mutable plan and its cost."""

    key: tuple[int, ...] = ()  # cost, compared lexicographically

    def __init__(self, costs: PlanCosts, plan: Sequence[int]) -> None:
        self._costs = costs
        self.effort = 0  # number of units and values examined so far
        self.plan = list(plan)  # device of every unit; changed by the methods only

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices."""
        for unit, device in zip(units, devices, strict=True):
            self.plan[unit] = device

    _move_back = move

    def improve(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices if that is better."""
        old_devices, key = [self.plan[unit] for unit in units], self.key
        self.move(units, devices)
        if not self.key < key:
            self._move_back(units, old_devices)
            self.key = key


class CallTime(Measure):
    """Cost for latency: excess of memory limits, time of one call (`call_ticks`), total work."""

    def __init__(self, costs: PlanCosts, plan: Sequence[int]) -> None:
        super().__init__(costs, plan)
        self.move((), ())

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices."""
        super().move(units, devices)
        costs = self._costs
        self.key = (*costs.excess_bytes(self.plan), call_ticks(costs, self.plan), costs.total(self.plan))
        self.effort += (len(self.plan) + len(costs.graph.values)) * (1 + len(costs.limits))


class BusiestQueue(Measure):
    """Cost for throughput: excess of memory limits, time of the busiest queue, of the second, and so on."""

    def __init__(self, costs: PlanCosts, plan: Sequence[int]) -> None:
        super().__init__(costs, plan)
        self._busy = costs.busy_queues(plan)
        self.key = self._sorted()

    def move(self, units: Sequence[int], devices: Sequence[int]) -> None:
        """Put units on devices, and update the cost incrementally."""
        costs = self._costs
        around = {value for unit in units for value in costs.around[unit]}
        self._add(units, around, -1)
        super().move(units, devices)
        self._add(units, around, 1)
        self.key = self._sorted()
        self.effort += len(units) + len(around)
        if costs.limits:  # memory is computed for the whole program
            self.effort += len(self.plan) + len(costs.graph.values)

    _move_back = move

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
