"""The search for the plan of least time for one call, or whose busiest queue works least.

Both problems are NP-hard, so the result is good rather than best. Starting points are the best of all plans that keep
each of a few clusters of units together, the plan of least work, for latency `heft`, for throughput the best cut of the
program in two, and within limits of memory `best_window`. Each is refined by moving and exchanging clusters, coarse
ones first, single units last, as long as that helps. Of few units (12 on two devices) the first is the best plan there
is.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence

from .cost_model import Objective
from .plan_costs import BusiestQueue, CallTime, Measure, PlanCosts, call_ticks
from .work_graph import OUTSIDE

# The plan of least work: the sum of what all ops and transfers take, whatever overlaps.
#
# For two devices the plan of least work is a minimum cut, found exactly. For more, pairs of devices exchange units by
# minimum cuts.

INFINITE = 1 << 62

# Rounds over all pairs of devices; later ones gain next to nothing.
_MAX_REFINEMENTS = 5


def min_work(costs: PlanCosts, plan: list[int]) -> list[int]:
    """The best plan that exchanges between pairs of devices lead to from this one; never more work than it is."""
    total = costs.total(plan)
    pairs = list(itertools.combinations(range(costs.devices), 2))
    # With two devices the first cut is the best one: nothing is left to improve.
    for _ in range(_MAX_REFINEMENTS if len(pairs) > 1 else 1):
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


# Heterogeneous earliest finish time: a plan for one call, made unit by unit.
#
# Units are placed in order of how long the work behind them takes at least, longest first; each goes to the device
# where it would end first, given when its operands can be there and what stands in the queues already (H. Topcuoglu,
# S. Hariri, M. Wu, Performance-effective and low-complexity task scheduling for heterogeneous computing, 2002). Gaps
# that a queue leaves between two units are not filled.


def heft(costs: PlanCosts) -> list[int]:
    """A device for every unit."""
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
    # When a value is on a device: it has been made there, or was taken there.
    there: list[dict[int, int]] = [
        {costs.where(OUTSIDE, plan): 0} if value.maker == OUTSIDE else {} for value in graph.values
    ]
    for unit in _ranked(costs, makes):
        best: tuple[int, int, list[int], dict[int, int]] | None = None
        for device in range(costs.devices):
            queues, arrivals = list(free), {}
            queue = costs.queue_of[device]
            start = 0
            for index in reads[unit]:
                if device not in there[index]:
                    source, made = next(iter(there[index].items()))
                    queues[queue] = max(queues[queue], made) + costs.transfer(graph.values[index].size, source, device)
                    arrivals[index] = queues[queue]
                start = max(start, there[index].get(device, 0), arrivals.get(index, 0))
            end = max(start, queues[queue]) + costs.ops[unit][device]
            queues[queue] = end
            if best is None or end < best[0]:
                best = end, device, queues, arrivals
        assert best is not None
        end, plan[unit], free, arrivals = best
        for index, arrival in arrivals.items():
            there[index][plan[unit]] = arrival
        for index in makes[unit]:
            there[index][plan[unit]] = end
    return plan


def _ranked(costs: PlanCosts, makes: list[list[int]]) -> list[int]:
    """Units, those first behind which most is to be done; a unit after those whose values it reads."""
    rank = [0] * len(makes)
    for unit in reversed(range(len(makes))):
        behind = 0
        for index in makes[unit]:
            value = costs.graph.values[index]
            later = [rank[reader] for reader in value.readers if reader > unit]
            if later:
                behind = max(behind, costs.crossing(value) + max(later))
        rank[unit] = behind + sum(costs.ops[unit]) // costs.devices
    return sorted(range(len(makes)), key=lambda unit: (-rank[unit], unit))


Clusters = list[list[int]]
"""Every unit in one of them; those of a cluster in program order."""

# Units and values looked at from one starting point: about a second.
_MAX_EFFORT = 300_000

# Plans of clusters that are all tried.
MAX_PLANS = 4096

# Rounds over the clusters of a level, and how many there may be for pairs of them to be exchanged.
_MAX_ROUNDS = 4
_MAX_EXCHANGED = 24


def best_plan(
    costs: PlanCosts,
    start: list[int],
    objective: Objective,
    max_plans: int = MAX_PLANS,
    others: Sequence[list[int]] = (),
) -> list[int]:
    """The best plan that the search finds.

    Parameters
    ----------
    start : list of int
        A plan; the result is no worse than this, and than the plan of least work. Plans within the limits of memory
        come first, where there are limits.
    objective : Objective
        "latency": the time of one call, of equal ones the least work. "throughput": the time of the busiest queue, then
        of the second, and so on; of equal ones the quickest call.
    max_plans : int
        How many plans of clusters are all tried.
    others : sequence of list of int
        Further starting points.
    """
    if costs.devices == 1:
        return start
    starts = [start, min_work(costs, start), *others]
    if costs.queues == 1 and not costs.limits:
        return starts[1]
    if objective == "throughput":
        starts.append(_best_cut(costs, start))
        levels = _levels(costs, max_plans)
        found: list[Measure] = [BusiestQueue(costs, plan) for plan in starts]
    else:
        levels = _levels(costs, min(max_plans, _MAX_EFFORT // (len(start) + len(costs.graph.values) + 1)))
        starts += [] if costs.limits else [heft(costs)]
        found = [CallTime(costs, plan) for plan in starts]
    _try_all(found[0], levels[0], costs.devices, max_plans)
    for measure in found:
        measure.effort = 0
        for clusters in levels:
            _refine(measure, clusters, costs.devices)
    return min(found, key=lambda measure: (measure.key, call_ticks(costs, measure.plan))).plan


def _levels(costs: PlanCosts, max_plans: int) -> list[Clusters]:
    """Partitions, the coarsest of as many clusters as so many plans can be made of."""
    min_clusters = 1
    while costs.devices ** (min_clusters + 1) <= max_plans:
        min_clusters += 1
    return cluster_levels(costs, min_clusters)


def _best_cut(costs: PlanCosts, start: list[int]) -> list[int]:
    """The best plan for throughput of those that put the program up to a unit on one device and the rest on another."""
    best, best_key = start, BusiestQueue(costs, start).key
    for first, second in itertools.permutations(range(costs.devices), 2):
        measure = BusiestQueue(costs, [second] * len(start))
        for unit in range(len(start)):
            measure.move([unit], [first])
            if measure.key < best_key:
                best, best_key = list(measure.plan), measure.key
    return best


def _try_all(measure: Measure, clusters: Clusters, devices: int, max_plans: int) -> None:
    """Make it the best of all plans that keep each cluster together, if they are few and one is better."""
    if devices ** len(clusters) > max_plans:
        return
    best, best_key = list(measure.plan), measure.key
    everything = range(len(best))
    measure.move(everything, [0] * len(best))
    for choice in itertools.product(range(devices), repeat=len(clusters)):
        changed = [
            (unit, device)
            for units, device in zip(clusters, choice, strict=True)
            if measure.plan[units[0]] != device
            for unit in units
        ]
        measure.move([unit for unit, _ in changed], [device for _, device in changed])
        if measure.key < best_key:
            best, best_key = list(measure.plan), measure.key
    measure.move(everything, best)


def _refine(measure: Measure, clusters: Clusters, devices: int) -> None:
    """Move clusters, and exchange pairs of them, as long as that makes it better."""
    for _ in range(_MAX_ROUNDS):
        before = measure.key
        for units in clusters:
            for device in range(devices):
                _try(measure, units, [device] * len(units))
        if len(clusters) <= _MAX_EXCHANGED:
            for first, second in itertools.combinations(clusters, 2):
                places = [measure.plan[second[0]]] * len(first) + [measure.plan[first[0]]] * len(second)
                _try(measure, first + second, places)
        if measure.key == before:
            return


def _try(measure: Measure, units: Sequence[int], devices: Sequence[int]) -> None:
    """Move units if that makes it better, and the search may go on."""
    if measure.effort < _MAX_EFFORT and [measure.plan[unit] for unit in units] != devices:
        measure.improve(units, devices)


def cluster_levels(costs: PlanCosts, min_clusters: int) -> list[Clusters]:
    """Partitions of the units, the coarsest first; the last has a cluster for each unit.

    Heavy-edge matching, as multilevel graph partitioning has it: clusters are joined in pairs, those first between
    which a transfer would cost most for the work that they are, until few are left.

    Parameters
    ----------
    min_clusters : int
        Joining stops at so many clusters. It may stop before: no cluster gets to be more than twice the average of so
        many, and clusters that nothing passes between are not joined.
    """
    clusters: Clusters = [[unit] for unit in range(len(costs.ops))]
    work = [min(ticks) + 1 for ticks in costs.ops]
    largest = 2 * sum(work) / max(min_clusters, 1)
    edges = _edges(costs)
    levels = [clusters]
    while len(clusters) > min_clusters:
        joined = _match(work, edges, largest, len(clusters) - min_clusters)
        count = max(joined, default=-1) + 1
        if count == len(clusters):
            break
        merged: Clusters = [[] for _ in range(count)]
        merged_work = [0] * count
        for cluster, into in enumerate(joined):
            merged[into] += clusters[cluster]
            merged_work[into] += work[cluster]
        clusters, work = [sorted(units) for units in merged], merged_work
        merged_edges: defaultdict[tuple[int, int], float] = defaultdict(float)
        for (a, b), weight in edges.items():
            if joined[a] != joined[b]:
                merged_edges[min(joined[a], joined[b]), max(joined[a], joined[b])] += weight
        edges = merged_edges
        levels.append(clusters)
    return levels[::-1]


def _edges(costs: PlanCosts) -> defaultdict[tuple[int, int], float]:
    """Cost of dividing two units, by pairs in order; of a value that many read, a share."""
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
    """For each cluster the one that it becomes part of: at most `max_pairs` pairs are joined."""
    partner = list(range(len(work)))
    rated = sorted(edges.items(), key=lambda edge: (-(edge[1] ** 2) / (work[edge[0][0]] * work[edge[0][1]]), edge[0]))
    for (a, b), _ in rated:
        if max_pairs > 0 and partner[a] == a and partner[b] == b and work[a] + work[b] <= largest:
            partner[b] = a
            partner[a] = b
            max_pairs -= 1
    numbers: dict[int, int] = {}
    return [numbers.setdefault(min(cluster, other), len(numbers)) for cluster, other in enumerate(partner)]
