"""The plan of least work: the sum of what all ops and transfers take, whatever overlaps.

For two devices the plan of least work is a minimum cut, found exactly. For more, pairs of devices exchange units by
minimum cuts.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

from .plan_costs import PlanCosts

INFINITE = 1 << 62

# Rounds over all pairs of devices; later ones gain next to nothing.
_MAX_ROUNDS = 5


def min_work(costs: PlanCosts, plan: list[int]) -> list[int]:
    """The best plan that exchanges between pairs of devices lead to from this one; never more work than it is."""
    total = costs.total(plan)
    pairs = list(itertools.combinations(range(costs.devices), 2))
    # With two devices the first cut is the best one: nothing is left to improve.
    for _ in range(_MAX_ROUNDS if len(pairs) > 1 else 1):
        before = total
        for first, second in pairs:
            candidate = _exchange(costs, plan, first, second)
            candidate_total = costs.total(candidate)
            if candidate_total < total:
                plan, total = candidate, candidate_total
        if total == before:
            break
    return plan


def _exchange(costs: PlanCosts, plan: Sequence[int], first: int, second: int) -> list[int]:
    """The best plan among those that move units of two devices between these two: a minimum cut.

    The source's side is `first`. A value made there costs its transfer once if any reader is on the other side:
    an extra node behind its maker, which each such reader pulls over to itself; likewise in the other direction.
    What does not move (units elsewhere, the caller) stands on neither side: its transfers are paid to the
    source or the sink.
    """
    node_of = {unit: node for node, unit in enumerate(u for u, device in enumerate(plan) if device in (first, second))}
    values = [value for value in costs.graph.values if not node_of.keys().isdisjoint((value.maker, *value.readers))]
    source = len(node_of) + 2 * len(values)
    sink = source + 1
    network = Network(sink + 1)
    # What it costs a node to be on each side, transfers to readers that do not move included.
    sides = [[costs.ops[unit][first], costs.ops[unit][second]] for unit in node_of]
    for index, value in enumerate(values):
        movable = [node_of[reader] for reader in value.readers if reader in node_of]
        fixed = {costs.where(reader, plan) for reader in value.readers if reader not in node_of}
        maker = node_of.get(value.maker)
        if maker is None:
            place = costs.where(value.maker, plan)
            before, after, on_first, on_second = source, sink, place, place
        else:
            before, after, on_first, on_second = maker, maker, first, second
            sides[maker][0] += sum(costs.transfer(value.size, first, place) for place in fixed)
            sides[maker][1] += sum(costs.transfer(value.size, second, place) for place in fixed)
        extra = len(node_of) + 2 * index
        if second not in fixed:  # else it goes there anyway
            network.add_arc(before, extra, costs.transfer(value.size, on_first, second))
            for reader in movable:
                network.add_arc(extra, reader, INFINITE)
        if first not in fixed:
            network.add_arc(extra + 1, after, costs.transfer(value.size, on_second, first))
            for reader in movable:
                network.add_arc(reader, extra + 1, INFINITE)
    for node, (cost_first, cost_second) in enumerate(sides):
        common = min(cost_first, cost_second)
        network.add_arc(source, node, cost_second - common)
        network.add_arc(node, sink, cost_first - common)
    with_source = network.source_side(source, sink)
    return [
        device if unit not in node_of else first if with_source[node_of[unit]] else second
        for unit, device in enumerate(plan)
    ]


class Network:
    """Nodes 0 … n-1 and arcs of integer capacities, cut between a source and a sink by Dinic's algorithm."""

    def __init__(self, num_nodes: int) -> None:
        self._first: list[list[int]] = [[] for _ in range(num_nodes)]
        self._head: list[int] = []
        self._capacity: list[int] = []

    def add_arc(self, tail: int, head: int, capacity: int, back: int = 0) -> None:
        """An arc, and one in the other direction with capacity `back`."""
        if capacity <= 0 and back <= 0:
            return
        for node, other, size in ((tail, head, capacity), (head, tail, back)):
            self._first[node].append(len(self._head))
            self._head.append(other)
            self._capacity.append(size)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """Which nodes are with the source in the minimum cut that has the fewest there. Uses the network up."""
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return [depth >= 0 for depth in level]
            self._saturate(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        head, capacity = self._head, self._capacity
        level = [-1] * len(self._first)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            if level[sink] >= 0 and level[node] >= level[sink]:
                break
            for arc in self._first[node]:
                if capacity[arc] > 0 and level[head[arc]] < 0:
                    level[head[arc]] = level[node] + 1
                    queue.append(head[arc])
        return level

    def _saturate(self, source: int, sink: int, level: list[int]) -> None:
        """Push flow along shortest paths until each has a full arc."""
        head, capacity, first = self._head, self._capacity, self._first
        position = [0] * len(first)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min(capacity[arc] for arc in path)
                full = len(path)
                for index in range(len(path) - 1, -1, -1):
                    arc = path[index]
                    capacity[arc] -= amount
                    capacity[arc ^ 1] += amount
                    if capacity[arc] == 0:
                        full = index
                node = head[path[full] ^ 1]
                del path[full:]
                continue
            arcs = first[node]
            while position[node] < len(arcs):
                arc = arcs[position[node]]
                if capacity[arc] > 0 and level[head[arc]] == level[node] + 1:
                    path.append(arc)
                    node = head[arc]
                    break
                position[node] += 1
            else:
                if not path:
                    return
                node = head[path.pop() ^ 1]
                position[node] += 1
