"""Search for the plan that minimizes the time of one call (latency) or of the busiest queue (throughput).

A plan assigns each unit of placement, which is the bindings of one ONNX node, a device. Both problems are NP-hard, so
the search is heuristic. It starts from several plans:

- the best of all plans that keep each of a few clusters of units on one device. Up to 12 units on two devices, each
  unit is a cluster, so that this plan is optimal;
- the plan of least work;
- for latency the plan of `heft`, for throughput the best split of the program in two, and with memory limits the plan
  of `best_window`.

Each is refined by moving and exchanging clusters, from coarse ones to single units, while its cost decreases.

The plan of least work minimizes the time of all ops and transfers in sequence. For two devices it is a minimum cut,
found exactly; for more, pairs of devices exchange units by minimum cuts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence

from .cost_model import Objective
from .plan_costs import BusiestQueue, CallTime, Measure, PlanCosts, call_ticks
from .work_graph import OUTSIDE

INFINITE = 1 << 62

_MAX_REFINEMENTS = 5  # maximum number of rounds over all pairs of devices; later ones gain little


def min_work(costs: PlanCosts, plan: list[int]) -> list[int]:
    """Reduce the total ticks of a plan by exchanging units between pairs of devices."""
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
    """The plan of least work among those that differ from `plan` only in the units of two devices: a minimum cut.

    Units on the source's side run on `first`, the others on `second`. A value is transferred once, however many readers
    are on the other side. Therefore it has two nodes of its own, one for each direction: an arc from or to its producer
    with the cost of the transfer, and infinite arcs to or from its readers. Units on other devices, and the caller, are
    fixed: transfers to and from them are part of the arcs of the source and the sink.
    """
    node_of = {unit: node for node, unit in enumerate(u for u, device in enumerate(plan) if device in (first, second))}
    values = [value for value in costs.graph.values if not node_of.keys().isdisjoint((value.producer, *value.readers))]
    source = len(node_of) + 2 * len(values)
    sink = source + 1
    network = Network(sink + 1)
    # Cost of each unit on `first` and `second`, including transfers to fixed readers.
    side_costs = [[costs.ops[unit][first], costs.ops[unit][second]] for unit in node_of]
    for index, value in enumerate(values):
        movable = [node_of[reader] for reader in value.readers if reader in node_of]
        fixed = {costs.device_of(reader, plan) for reader in value.readers if reader not in node_of}
        producer = node_of.get(value.producer)
        if producer is None:
            producer_device = costs.device_of(value.producer, plan)
            tail, head, first_source, second_source = source, sink, producer_device, producer_device
        else:
            tail, head, first_source, second_source = producer, producer, first, second
            side_costs[producer][0] += sum(costs.transfer(value.size, first, device) for device in fixed)
            side_costs[producer][1] += sum(costs.transfer(value.size, second, device) for device in fixed)
        to_second = len(node_of) + 2 * index
        to_first = to_second + 1
        if second not in fixed:  # else the transfer happens anyway
            network.add_arc(tail, to_second, costs.transfer(value.size, first_source, second))
            for reader in movable:
                network.add_arc(to_second, reader, INFINITE)
        if first not in fixed:
            network.add_arc(to_first, head, costs.transfer(value.size, second_source, first))
            for reader in movable:
                network.add_arc(reader, to_first, INFINITE)
    for node, (cost_first, cost_second) in enumerate(side_costs):
        common = min(cost_first, cost_second)
        network.add_arc(source, node, cost_second - common)
        network.add_arc(node, sink, cost_first - common)
    is_on_first = network.source_side(source, sink)
    return [
        device if unit not in node_of else first if is_on_first[node_of[unit]] else second
        for unit, device in enumerate(plan)
    ]


class Network:
    """Flow network of nodes 0 … n-1 and arcs with integer capacities; minimum cuts by Dinic's algorithm."""

    def __init__(self, num_nodes: int) -> None:
        self._arcs: list[list[int]] = [[] for _ in range(num_nodes)]  # arcs from each node; the reverse of i is i ^ 1
        self._head: list[int] = []
        self._capacity: list[int] = []

    def add_arc(self, tail: int, head: int, capacity: int) -> None:
        """Add an arc, and its reverse without capacity."""
        if capacity <= 0:
            return
        for node, other, size in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[node].append(len(self._head))
            self._head.append(other)
            self._capacity.append(size)

    def source_side(self, source: int, sink: int) -> list[bool]:
        """True for each node on the source's side of a minimum cut, the smallest such side; consumes the network."""
        while True:
            level = self._levels(source, sink)
            if level[sink] < 0:
                return [depth >= 0 for depth in level]
            self._push_blocking_flow(source, sink, level)

    def _levels(self, source: int, sink: int) -> list[int]:
        head, capacity = self._head, self._capacity
        """Number of arcs from the source to each node; -1 if there is no path."""
        level = [-1] * len(self._arcs)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            if level[sink] >= 0 and level[node] >= level[sink]:
                break
            for arc in self._arcs[node]:
                if capacity[arc] > 0 and level[head[arc]] < 0:
                    level[head[arc]] = level[node] + 1
                    queue.append(head[arc])
        return level

    def _push_blocking_flow(self, source: int, sink: int, level: list[int]) -> None:
        """Push flow along shortest paths until each has an arc without capacity."""
        head, capacity = self._head, self._capacity
        next_arc = [0] * len(self._arcs)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min(capacity[arc] for arc in path)
                first_full = len(path)
                for index in range(len(path) - 1, -1, -1):
                    arc = path[index]
                    capacity[arc] -= amount
                    capacity[arc ^ 1] += amount
                    if capacity[arc] == 0:
                        first_full = index
                node = head[path[first_full] ^ 1]
                del path[first_full:]
                continue
            arcs = self._arcs[node]
            while next_arc[node] < len(arcs):
                arc = arcs[next_arc[node]]
                if capacity[arc] > 0 and level[head[arc]] == level[node] + 1:
                    path.append(arc)
                    node = head[arc]
                    break
                next_arc[node] += 1
            else:
                if not path:
                    return
                node = head[path.pop() ^ 1]
                next_arc[node] += 1


def heft(costs: PlanCosts) -> list[int]:
    """Plan by heterogeneous earliest finish time (HEFT), which only appends to queues and leaves idle gaps in them.

    Units are placed by decreasing length of the critical path from them; each goes to the device where it ends first
    (H. Topcuoglu, S. Hariri, M. Wu, Performance-effective and low-complexity task scheduling for heterogeneous
    computing, 2002).
    """
    graph = costs.graph
    # Indices of the values that each unit reads and writes.
    reads: list[list[int]] = [[] for _ in graph.units]
    writes: list[list[int]] = [[] for _ in graph.units]
    for index, value in enumerate(graph.values):
        if value.producer != OUTSIDE:
            writes[value.producer].append(index)
        for reader in value.readers:
            if reader > value.producer:
                reads[reader].append(index)
    plan = [0] * len(graph.units)
    queue_ends = [0] * costs.queues
    # For each value, device -> time at which it arrives there.
    available: list[dict[int, int]] = [
        {costs.device_of(OUTSIDE, plan): 0} if value.producer == OUTSIDE else {} for value in graph.values
    ]
    for unit in _by_critical_path(costs, writes):
        best: tuple[int, int, list[int], dict[int, int]] | None = None
        for device in range(costs.devices):
            ends, arrivals = list(queue_ends), {}
            queue = costs.queue_of[device]
            start = 0
            for index in reads[unit]:
                if device not in available[index]:
                    source, ready = next(iter(available[index].items()))
                    ends[queue] = max(ends[queue], ready) + costs.transfer(graph.values[index].size, source, device)
                    arrivals[index] = ends[queue]
                start = max(start, available[index].get(device, 0), arrivals.get(index, 0))
            end = max(start, ends[queue]) + costs.ops[unit][device]
            ends[queue] = end
            if best is None or end < best[0]:
                best = end, device, ends, arrivals
        assert best is not None
        end, plan[unit], queue_ends, arrivals = best
        for index, arrival in arrivals.items():
            available[index][plan[unit]] = arrival
        for index in writes[unit]:
            available[index][plan[unit]] = end
    return plan


def _by_critical_path(costs: PlanCosts, writes: list[list[int]]) -> list[int]:
    """Units by decreasing length of the critical path from them; producers precede readers."""
    rank = [0] * len(writes)
    for unit in reversed(range(len(writes))):
        after_unit = 0
        for index in writes[unit]:
            value = costs.graph.values[index]
            reader_ranks = [rank[reader] for reader in value.readers if reader > unit]
            if reader_ranks:
                after_unit = max(after_unit, costs.mean_transfer(value) + max(reader_ranks))
        rank[unit] = after_unit + sum(costs.ops[unit]) // costs.devices
    return sorted(range(len(writes)), key=lambda unit: (-rank[unit], unit))


Clusters = list[list[int]]
"""A partition of all units; the units of a cluster are in program order."""

# Maximum number of units and values that a refinement of one starting point examines, which takes about a second.
_MAX_EFFORT = 300_000

MAX_PLANS = 4096  # maximum number of assignments of clusters to devices that exhaustive search tries

# Maximum number of passes over the clusters of one partition, and of clusters whose pairs are exchanged.
_MAX_ROUNDS = 4
_MAX_EXCHANGED = 24


def best_plan(
    costs: PlanCosts,
    # A plan; the result is at least as good as this one and the plan of least work. A plan within the memory limits is
    # better than any other.
    start: list[int],
    # "latency" minimizes the time of one call, and among equal plans their work. "throughput" minimizes the time of the
    # busiest queue, then that of the second busiest, and so on, then the time of one call.
    objective: Objective,
    max_plans: int = MAX_PLANS,  # maximum number of assignments of clusters to devices that exhaustive search tries
    extra_starts: Sequence[list[int]] = (),  # further starting points
) -> list[int]:
    """Search for the best plan."""
    if costs.devices == 1:
        return start
    min_work_plan = min_work(costs, start)
    if costs.queues == 1 and not costs.limits:
        return min_work_plan
    starts = [start, min_work_plan, *extra_starts]
    if objective == "throughput":
        starts.append(_best_split(costs, start))
        levels = _coarsening_levels(costs, max_plans)
        measures: list[Measure] = [BusiestQueue(costs, plan) for plan in starts]
    else:
        levels = _coarsening_levels(costs, min(max_plans, _MAX_EFFORT // (len(start) + len(costs.graph.values) + 1)))
        starts += [] if costs.limits else [heft(costs)]
        measures = [CallTime(costs, plan) for plan in starts]
    _try_all_plans(measures[0], levels[0], costs.devices, max_plans)
    for measure in measures:
        measure.effort = 0
        for clusters in levels:
            _refine(measure, clusters, costs.devices)
    return min(measures, key=lambda measure: (measure.key, call_ticks(costs, measure.plan))).plan


def _coarsening_levels(costs: PlanCosts, max_plans: int) -> list[Clusters]:
    """Partitions, coarsest first: its clusters are as many as can have at most `max_plans` assignments to devices."""
    num_clusters = 1
    while costs.devices ** (num_clusters + 1) <= max_plans:
        num_clusters += 1
    return cluster_levels(costs, num_clusters)


def _best_split(costs: PlanCosts, start: list[int]) -> list[int]:
    """The best plan for throughput among those with one device up to some unit and another after it."""
    best, best_key = start, BusiestQueue(costs, start).key
    for first, second in itertools.permutations(range(costs.devices), 2):
        measure = BusiestQueue(costs, [second] * len(start))
        for unit in range(len(start)):
            measure.move([unit], [first])
            if measure.key < best_key:
                best, best_key = list(measure.plan), measure.key
    return best


def _try_all_plans(measure: Measure, clusters: Clusters, devices: int, max_plans: int) -> None:
    """Move to the best of all plans that keep each cluster on one device, unless these are more than `max_plans`."""
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
    """Move clusters to other devices, and exchange the devices of pairs, while the cost decreases."""
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
    """Move units if that decreases the cost, unless the limit of effort is reached."""
    if measure.effort < _MAX_EFFORT and [measure.plan[unit] for unit in units] != devices:
        measure.improve(units, devices)


def cluster_levels(costs: PlanCosts, min_clusters: int) -> list[Clusters]:
    """Partitions of the units, from the coarsest to single units.

    Heavy-edge matching, as in multilevel graph partitioning: pairs of clusters are joined by decreasing ratio of the
    cost of transfers between them to the geometric mean of their work. `min_clusters`: number of clusters at which
    joining stops. It stops earlier if any further join would exceed twice the average work of so many clusters, or no
    two clusters exchange a value.
    """
    clusters: Clusters = [[unit] for unit in range(len(costs.ops))]
    work = [min(ticks) + 1 for ticks in costs.ops]
    max_work = 2 * sum(work) / max(min_clusters, 1)
    edges = _edges(costs)
    levels = [clusters]
    while len(clusters) > min_clusters:
        matches = _match(work, edges, max_work, len(clusters) - min_clusters)
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
    """(earlier unit, later unit) -> cost of transfers between them; the readers of a value share its cost."""
    edges: defaultdict[tuple[int, int], float] = defaultdict(float)
    for value in costs.graph.values:
        if value.producer == OUTSIDE:
            continue
        share = (costs.mean_transfer(value) + 1) / len(value.readers)
        for reader in value.readers:
            if reader != OUTSIDE:
                edges[min(value.producer, reader), max(value.producer, reader)] += share
    return edges


def _match(work: list[int], edges: dict[tuple[int, int], float], max_work: float, max_pairs: int) -> list[int]:
    """New index of each cluster after at most `max_pairs` pairs are joined."""
    partner = list(range(len(work)))
    ranked = sorted(edges.items(), key=lambda edge: (-(edge[1] ** 2) / (work[edge[0][0]] * work[edge[0][1]]), edge[0]))
    for (a, b), _ in ranked:
        if max_pairs > 0 and partner[a] == a and partner[b] == b and work[a] + work[b] <= max_work:
            partner[b] = a
            partner[a] = b
            max_pairs -= 1
    new_indices: dict[int, int] = {}
    return [new_indices.setdefault(min(pair), len(new_indices)) for pair in enumerate(partner)]
