"""Heterogeneous earliest finish time: a plan for one call, made unit by unit.

Units are placed in order of how long the work behind them takes at least, longest first; each goes to the device
where it would end first, given when its operands can be there and what stands in the queues already (H. Topcuoglu,
S. Hariri, M. Wu, Performance-effective and low-complexity task scheduling for heterogeneous computing, 2002). Gaps
that a queue leaves between two units are not filled.
"""

from __future__ import annotations

from .plan_costs import PlanCosts
from .work_graph import OUTSIDE


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
