"""Search for a plan with the least time of one call, or with the least time of the busiest queue.

Both problems are NP-hard, so the search is heuristic. Starting points are the best of all plans that keep each of a few
clusters of units together (optimal for few units: 12 on two devices), the plan of least work, for latency `heft`, for
throughput the best cut of the program in two, and with memory limits `best_window`. Each is refined by moving and
exchanging clusters, from coarse ones to single units, while that helps.

The plan of least work minimizes the sum of all ops and transfers regardless of overlap. For two devices it is a minimum
cut, found exactly; for more, pairs of devices exchange units by minimum cuts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence

from .cost_model import Objective
from .plan_costs import BusiestQueue, CallTime, Measure, PlanCosts, call_ticks
from .work_graph import OUTSIDE

INFINITE = 1 << 62

# Maximum number of rounds over all pairs of devices; later ones gain little.
_MAX_REFINEMENTS = 5


def min_work(costs: PlanCosts, plan: list[int]) -> list[int]:
    """Reduce the work of a plan by exchanges between pairs of devices."""
    total = costs.total(plan)
    pairs = list(itertools.combinations(range(costs.devices), 2))
    # With two devices the first cut is optimal.
    for _ in range(_MAX_REFINEMENTS if len(pairs) > 1 else 1):
        previous_total = total
        for first, second in pairs:
            candidate = _exchange(costs, plan, first, second)
            candidate_total = costs.total(candidate)
            if candidate_total < total:
                plan, total = candidate, candidate_total
        if total == previous_total:
            break
    return plan


def _exchange(costs: PlanCosts, plan: Sequence[int], first: int, second: int) -> list[int]:
    """The best plan that moves units between two devices: a minimum cut.

    The source's side is `first`. A value produced there costs one transfer if any reader is on the other side: an extra
    node after its producer, which infinite arcs from such readers pull to their side; likewise in the other direction.
    Transfers to and from fixed units (on other devices, or the caller) are charged to the source or the sink.
    """
    node_of = {unit: node for node, unit in enumerate(u for u, device in enumerate(plan) if device in (first, second))}
    values = [value for value in costs.graph.values if not node_of.keys().isdisjoint((value.maker, *value.readers))]
    source = len(node_of) + 2 * len(values)
    sink = source + 1
    network = Network(sink + 1)
    # Cost of a node on each side, including transfers to fixed readers.
    side_costs = [[costs.ops[unit][first], costs.ops[unit][second]] for unit in node_of]
    for index, value in enumerate(values):
        movable = [node_of[reader] for reader in value.readers if reader in node_of]
        fixed = {costs.where(reader, plan) for reader in value.readers if reader not in node_of}
        maker = node_of.get(value.maker)
        if maker is None:
            maker_device = costs.where(value.maker, plan)
            tail, head, on_first, on_second = source, sink, maker_device, maker_device
        else:
            tail, head, on_first, on_second = maker, maker, first, second
            side_costs[maker][0] += sum(costs.transfer(value.size, first, device) for device in fixed)
            side_costs[maker][1] += sum(costs.transfer(value.size, second, device) for device in fixed)
        extra = len(node_of) + 2 * index
        if second not in fixed:  # else the transfer happens anyway
            network.add_arc(tail, extra, costs.transfer(value.size, on_first, second))
            for reader in movable:
                network.add_arc(extra, reader, INFINITE)
        if first not in fixed:
            network.add_arc(extra + 1, head, costs.transfer(value.size, on_second, first))
            for reader in movable:
                network.add_arc(reader, extra + 1, INFINITE)
    for node, (cost_first, cost_second) in enumerate(side_costs):
        common = min(cost_first, cost_second)
        network.add_arc(source, node, cost_second - common)
        network.add_arc(node, sink, cost_first - common)
    with_source = network.source_side(source, sink)
    return [
        device if unit not in node_of else first if with_source[node_of[unit]] else second
        for unit, device in enumerate(plan)
    ]


class Network:
    """Flow network of nodes 0 … n-1 and arcs with integer capacities; minimum cuts by Dinic's algorithm."""

    def __init__(self, num_nodes: int) -> None:
        self._first: list[list[int]] = [[] for _ in range(num_nodes)]
        self._head: list[int] = []
        self._capacity: list[int] = []

    def add_arc(self, tail: int, head: int, capacity: int, back: int = 0) -> None:
        """Add an arc, and one in the other direction with capacity `back`."""
        if capacity <= 0 and back <= 0:
            return
        for node, other, size in ((tail, head, capacity), (head, tail, back)):
            self._first[node].append(len(self._head))
            self._head.append(other)
            self._capacity.append(size)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """True for each node on the source's side of the minimum cut with the smallest one. Consumes the network."""
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
        """Push a blocking flow along shortest paths."""
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


def heft(costs: PlanCosts) -> list[int]:
    """Plan by heterogeneous earliest finish time, without insertion into gaps of queues.

    Units are placed by decreasing length of the critical path after them; each goes to the device where it ends first
    (H. Topcuoglu, S. Hariri, M. Wu, Performance-effective and low-complexity task scheduling for heterogeneous
    computing, 2002).
    """
    graph = costs.graph
    reads: list[list[int]] = [[] for _ in graph.units]
    makes: list[list[int]] = [[] for _ in graph.units]
    for index, value in enumerate(graph.values):
        if value.maker != OUTSIDE:
            makes[value.maker].append(index)
        for reader in value.readers:
            if reader > value.maker:
                reads[reader].append(index)
    plan = [0] * len(graph.units)
    free = [0] * costs.queues
    # For each value, device -> time from which it is there.
    available: list[dict[int, int]] = [
        {costs.where(OUTSIDE, plan): 0} if value.maker == OUTSIDE else {} for value in graph.values
    ]
    for unit in _ranked(costs, makes):
        best: tuple[int, int, list[int], dict[int, int]] | None = None
        for device in range(costs.devices):
            queues, arrivals = list(free), {}
            queue = costs.queue_of[device]
            start = 0
            for index in reads[unit]:
                if device not in available[index]:
                    source, ready = next(iter(available[index].items()))
                    queues[queue] = max(queues[queue], ready) + costs.transfer(graph.values[index].size, source, device)
                    arrivals[index] = queues[queue]
                start = max(start, available[index].get(device, 0), arrivals.get(index, 0))
            end = max(start, queues[queue]) + costs.ops[unit][device]
            queues[queue] = end
            if best is None or end < best[0]:
                best = end, device, queues, arrivals
        assert best is not None
        end, plan[unit], free, arrivals = best
        for index, arrival in arrivals.items():
            available[index][plan[unit]] = arrival
        for index in makes[unit]:
            available[index][plan[unit]] = end
    return plan


def _ranked(costs: PlanCosts, makes: list[list[int]]) -> list[int]:
    """Units by decreasing length of the critical path after them; producers precede readers."""
    rank = [0] * len(makes)
    for unit in reversed(range(len(makes))):
        remaining = 0
        for index in makes[unit]:
            value = costs.graph.values[index]
            reader_ranks = [rank[reader] for reader in value.readers if reader > unit]
            if reader_ranks:
                remaining = max(remaining, costs.crossing(value) + max(reader_ranks))
        rank[unit] = remaining + sum(costs.ops[unit]) // costs.devices
    return sorted(range(len(makes)), key=lambda unit: (-rank[unit], unit))


Clusters = list[list[int]]
"""A partition of all units; the units of a cluster are in program order."""

# Maximum number of units and values examined from one starting point, about a second.
_MAX_EFFORT = 300_000

# Maximum number of plans of clusters for exhaustive search.
MAX_PLANS = 4096

# Maximum number of rounds over the clusters of a level, and of clusters for exchanges of pairs.
_MAX_ROUNDS = 4
_MAX_EXCHANGED = 24


def best_plan(
    costs: PlanCosts,
    start: list[int],
    objective: Objective,
    max_plans: int = MAX_PLANS,
    extra_starts: Sequence[list[int]] = (),
) -> list[int]:
    """Search for the best plan.

    Parameters
    ----------
    start : list of int
        A plan; the result is not worse than this one and the plan of least work. Plans within memory limits are better
        than others.
    objective : Objective
        "latency": the time of one call, then the least work. "throughput": the time of the busiest queue, then of the
        second, and so on, then the time of one call.
    max_plans : int
        Maximum number of plans of clusters for exhaustive search.
    extra_starts : sequence of list of int
        Further starting points.
    """
    if costs.devices == 1:
        return start
    starts = [start, min_work(costs, start), *extra_starts]
    if costs.queues == 1 and not costs.limits:
        return starts[1]
    if objective == "throughput":
        starts.append(_best_cut(costs, start))
        levels = _levels(costs, max_plans)
        measures: list[Measure] = [BusiestQueue(costs, plan) for plan in starts]
    else:
        levels = _levels(costs, min(max_plans, _MAX_EFFORT // (len(start) + len(costs.graph.values) + 1)))
        starts += [] if costs.limits else [heft(costs)]
        measures = [CallTime(costs, plan) for plan in starts]
    _try_all_plans(measures[0], levels[0], costs.devices, max_plans)
    for measure in measures:
        measure.effort = 0
        for clusters in levels:
            _refine(measure, clusters, costs.devices)
    return min(measures, key=lambda measure: (measure.key, call_ticks(costs, measure.plan))).plan


def _levels(costs: PlanCosts, max_plans: int) -> list[Clusters]:
    """Partitions; the coarsest has the most clusters that allow an exhaustive search of `max_plans`."""
    min_clusters = 1
    while costs.devices ** (min_clusters + 1) <= max_plans:
        min_clusters += 1
    return cluster_levels(costs, min_clusters)


def _best_cut(costs: PlanCosts, start: list[int]) -> list[int]:
    """The best plan for throughput that splits the program at a unit, with one device before and another after it."""
    best, best_key = start, BusiestQueue(costs, start).key
    for first, second in itertools.permutations(range(costs.devices), 2):
        measure = BusiestQueue(costs, [second] * len(start))
        for unit in range(len(start)):
            measure.move([unit], [first])
            if measure.key < best_key:
                best, best_key = list(measure.plan), measure.key
    return best


def _try_all_plans(measure: Measure, clusters: Clusters, devices: int, max_plans: int) -> None:
    """Try all plans that keep each cluster together, unless they are too many."""
    if devices ** len(clusters) > max_plans:
        return
    best, best_key = list(measure.plan), measure.key
    all_units = range(len(best))
    measure.move(all_units, [0] * len(best))
    for choice in itertools.product(range(devices), repeat=len(clusters)):
        changes = [
            (unit, device)
            for units, device in zip(clusters, choice, strict=True)
            if measure.plan[units[0]] != device
            for unit in units
        ]
        measure.move([unit for unit, _ in changes], [device for _, device in changes])
        if measure.key < best_key:
            best, best_key = list(measure.plan), measure.key
    measure.move(all_units, best)


def _refine(measure: Measure, clusters: Clusters, devices: int) -> None:
    """Move clusters and exchange pairs of them while the cost decreases."""
    for _ in range(_MAX_ROUNDS):
        previous_key = measure.key
        for units in clusters:
            for device in range(devices):
                _try_move(measure, units, [device] * len(units))
        if len(clusters) <= _MAX_EXCHANGED:
            for first, second in itertools.combinations(clusters, 2):
                swapped_devices = [measure.plan[second[0]]] * len(first) + [measure.plan[first[0]]] * len(second)
                _try_move(measure, first + second, swapped_devices)
        if measure.key == previous_key:
            return


def _try_move(measure: Measure, units: Sequence[int], devices: Sequence[int]) -> None:
    """Move units if that is better, within the limit of effort."""
    if measure.effort < _MAX_EFFORT and [measure.plan[unit] for unit in units] != devices:
        measure.improve(units, devices)


def cluster_levels(costs: PlanCosts, min_clusters: int) -> list[Clusters]:
    """Partitions of the units, from the coarsest to single units.

    Heavy-edge matching, as in multilevel graph partitioning: pairs of clusters are joined by decreasing cost of a
    transfer between them relative to their work.

    Parameters
    ----------
    min_clusters : int
        Joining stops at this number of clusters, or earlier: no cluster exceeds twice the average work of this number,
        and clusters without an edge are not joined.
    """
    clusters: Clusters = [[unit] for unit in range(len(costs.ops))]
    work = [min(ticks) + 1 for ticks in costs.ops]
    largest = 2 * sum(work) / max(min_clusters, 1)
    edges = _edges(costs)
    levels = [clusters]
    while len(clusters) > min_clusters:
        matches = _match(work, edges, largest, len(clusters) - min_clusters)
        count = max(matches, default=-1) + 1
        if count == len(clusters):
            break
        merged: Clusters = [[] for _ in range(count)]
        merged_work = [0] * count
        for cluster, target in enumerate(matches):
            merged[target] += clusters[cluster]
            merged_work[target] += work[cluster]
        clusters, work = [sorted(units) for units in merged], merged_work
        merged_edges: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (a, b), weight in edges.items():
            if matches[a] != matches[b]:
                merged_edges[min(matches[a], matches[b]), max(matches[a], matches[b])] += weight
        edges = merged_edges
        levels.append(clusters)
    return levels[::-1]


def _edges(costs: PlanCosts) -> defaultdict[tuple[int, int], float]:
    """Ordered pair of units -> cost of a transfer between them; readers of a value share its cost."""
    edges: defaultdict[tuple[int, int], float] = defaultdict(float)
    for value in costs.graph.values:
        if value.maker == OUTSIDE:
            continue
        share = (costs.crossing(value) + 1) / len(value.readers)
        for reader in value.readers:
            if reader != OUTSIDE:
                edges[min(value.maker, reader), max(value.maker, reader)] += share
    return edges


def _match(work: list[int], edges: dict[tuple[int, int], float], largest: float, max_pairs: int) -> list[int]:
    """New index of each cluster after at most `max_pairs` pairs are joined."""
    partner = list(range(len(work)))
    ranked = sorted(edges.items(), key=lambda edge: (-(edge[1] ** 2) / (work[edge[0][0]] * work[edge[0][1]]), edge[0]))
    for (a, b), _ in ranked:
        if max_pairs > 0 and partner[a] == a and partner[b] == b and work[a] + work[b] <= largest:
            partner[b] = a
            partner[a] = b
            max_pairs -= 1
    numbers: dict[int, int] = {}
    return [numbers.setdefault(min(cluster, other), len(numbers)) for cluster, other in enumerate(partner)]
