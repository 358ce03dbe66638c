"""Graphs to place and models of what that costs."""

import itertools

from hypothesis import strategies as st

from relax_hetero.frontend import CostModel, DeviceCost, LinkCost
from relax_hetero.frontend.auto.plan_costs import PlanCosts
from relax_hetero.frontend.auto.work_graph import OUTSIDE, Work, WorkGraph, WorkUnit, WorkValue

# A device that does an operation a second, and links that take a second a byte: costs are whole seconds.
SLOW = DeviceCost(1, 1e30, 0)
SECOND = 10**12  # ticks


def links(num_devices, host, bandwidth=1e10, latency=1e-6):
    places = sorted({*range(num_devices), host})
    return {(a, b): LinkCost(bandwidth, latency) for a in places for b in places if a != b}


def costs_of(flops, values, devices=(SLOW, SLOW), host=0, queues=()):
    """A unit for each number of flops; a value for each (bytes, producer, readers)."""
    graph = WorkGraph(
        [WorkUnit([str(i)], [Work(work, 0)]) for i, work in enumerate(flops)], [WorkValue(*v) for v in values]
    )
    return PlanCosts(graph, CostModel(list(devices), links(len(devices), host, 1, 0), host, queues=queues))


def chain(flops, size):
    """Units in a row, and values of `size` bytes between them; what comes in and goes out is free."""
    return flops, [(size, unit, [unit + 1]) for unit in range(len(flops) - 1)]


@st.composite
def problems(draw, num_devices, most_units=6, in_order=True):
    """A graph under a model; unless `in_order`, values may go to units before their producer."""
    count = draw(st.integers(1, most_units))
    rates = st.sampled_from([1e9, 1e10, 1e11, 1e12])
    units = [
        WorkUnit([str(i)], [Work(draw(st.sampled_from([0.0, 1e6, 1e8])), draw(st.floats(0, 1e6)))])
        for i in range(count)
    ]
    values = []
    for producer in (OUTSIDE, *range(count)):
        possible = [*range(producer + 1 if in_order else 0, count), OUTSIDE]
        readers = draw(st.lists(st.sampled_from(possible), unique=True, max_size=4))
        readers = [reader for reader in readers if reader != producer]
        if readers:
            values.append(WorkValue(draw(st.floats(1, 1e6)), producer, readers))
    host = draw(st.sampled_from([-1, 0, num_devices - 1]))
    places = sorted({*range(num_devices), host})
    devices = [DeviceCost(draw(rates), draw(rates), draw(st.floats(0, 1e-5))) for _ in range(num_devices)]
    roads = {(a, b): LinkCost(draw(rates), draw(st.floats(0, 1e-5))) for a in places for b in places if a != b}
    return PlanCosts(WorkGraph(units, values), CostModel(devices, roads, host))


def all_plans(costs):
    return (list(plan) for plan in itertools.product(range(costs.devices), repeat=len(costs.ops)))


def single_plans(costs):
    return [[device] * len(costs.ops) for device in range(costs.devices)]
