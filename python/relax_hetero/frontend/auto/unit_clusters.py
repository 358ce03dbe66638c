"""Clusters of units that much passes between, coarse to fine: what a search over plans moves as a whole.

Heavy-edge matching, as multilevel graph partitioning has it: clusters are joined in pairs, those first between which a
transfer would cost most for the work that they are, until few are left.
"""

from __future__ import annotations

from collections import defaultdict

from .plan_costs import PlanCosts
from .work_graph import OUTSIDE

Clusters = list[list[int]]
"""Every unit in one of them; those of a cluster in program order."""


def cluster_levels(costs: PlanCosts, fewest: int) -> list[Clusters]:
    """Partitions of the units, the coarsest first; the last has a cluster for each unit.

    Parameters
    ----------
    costs : PlanCosts
    fewest : int
        Joining stops at so many clusters. It may stop before: no cluster gets to be more than twice the average of
        so many, and clusters that nothing passes between are not joined.
    """
    clusters: Clusters = [[unit] for unit in range(len(costs.ops))]
    work = [min(ticks) + 1 for ticks in costs.ops]
    largest = 2 * sum(work) / max(fewest, 1)
    edges = _edges(costs)
    levels = [clusters]
    while len(clusters) > fewest:
        joined = _match(work, edges, largest, len(clusters) - fewest)
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
    """What it costs to divide two units, by pairs in order; of a value that many read, a share."""
    edges: defaultdict[tuple[int, int], float] = defaultdict(float)
    for value in costs.graph.values:
        if value.maker == OUTSIDE:
            continue
        share = (costs.crossing(value) + 1) / len(value.readers)
        for reader in value.readers:
            if reader != OUTSIDE:
                edges[min(value.maker, reader), max(value.maker, reader)] += share
    return edges


def _match(work: list[int], edges: dict[tuple[int, int], float], largest: float, most: int) -> list[int]:
    """For each cluster the one that it becomes part of: at most `most` pairs are joined."""
    partner = list(range(len(work)))
    rated = sorted(edges.items(), key=lambda edge: (-(edge[1] ** 2) / (work[edge[0][0]] * work[edge[0][1]]), edge[0]))
    for (a, b), _ in rated:
        if most > 0 and partner[a] == a and partner[b] == b and work[a] + work[b] <= largest:
            partner[b] = a
            partner[a] = b
            most -= 1
    numbers: dict[int, int] = {}
    return [numbers.setdefault(min(cluster, other), len(numbers)) for cluster, other in enumerate(partner)]
