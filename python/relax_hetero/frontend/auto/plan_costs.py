"""What a plan, a device for every unit of a graph, costs: in whole ticks, so that it is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cost_model import CostModel
from .work_graph import OUTSIDE, Value, WorkGraph

TICKS = 1e12
"""Ticks in a second: picoseconds."""


class PlanCosts:
    """Costs of one graph under one model.

    A transfer is work of the queue that it goes to, as at run time; of the one that it comes from where it goes to an
    implicit host, which has no queue.

    Attributes
    ----------
    graph : WorkGraph
    devices : int
        How many there are.
    queues : int
        How many queues they have.
    queue_of : list of int
        The queue of each device.
    ops : list of list of int
        Ticks of each unit on each device.
    around : list of list of int
        For each unit the values that it makes or reads, as positions in ``graph.values``.
    """

    def __init__(self, graph: WorkGraph, model: CostModel) -> None:
        self.graph = graph
        self.devices = len(model.devices)
        self.queue_of = list(model.queues) or list(range(self.devices))
        self.queues = max(self.queue_of) + 1
        self.ops = [
            [sum(_ticks(model.op_seconds(flops, moved, device)) for flops, moved in unit.ops) for device in self._all()]
            for unit in graph.units
        ]
        self.around: list[list[int]] = [[] for _ in graph.units]
        for index, value in enumerate(graph.values):
            for unit in {value.maker, *value.readers} - {OUTSIDE}:
                self.around[unit].append(index)
        self._model = model

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

    def transfers(self, value: Value, plan: Sequence[int]) -> Iterator[tuple[int, int, int]]:
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

    def crossing(self, value: Value) -> int:
        """Ticks of a transfer of a value between two devices, on average."""
        pairs = [(a, b) for a in self._all() for b in self._all() if a != b]
        return sum(self.transfer(value.size, a, b) for a, b in pairs) // max(len(pairs), 1)

    def _all(self) -> range:
        return range(self.devices)


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)
