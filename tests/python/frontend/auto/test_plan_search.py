"""The search for the best plan, against all plans of small graphs, and the clusters that it moves."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.plan_problems import SECOND, all_plans, chain, costs_of, links, problems, single_plans
from relax_hetero.frontend import CostModel, DeviceCost
from relax_hetero.frontend.auto import plan_search
from relax_hetero.frontend.auto.plan_costs import PlanCosts, call_ticks
from relax_hetero.frontend.auto.plan_search import best_plan, cluster_levels, min_work
from relax_hetero.frontend.auto.work_graph import OUTSIDE, Work, WorkGraph, WorkUnit, WorkValue

OBJECTIVES = ["latency", "throughput"]


def worth(costs, plan, objective):
    return call_ticks(costs, plan) if objective == "latency" else max(costs.busy_queues(plan))


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(costs=problems(2))
@settings(max_examples=25)
def test_of_few_units_the_plan_is_the_best_there_is(costs, objective):
    plan = best_plan(costs, [0] * len(costs.ops), objective)
    assert worth(costs, plan, objective) == min(worth(costs, other, objective) for other in all_plans(costs))


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(costs=problems(3, most_units=8, in_order=False))
@settings(max_examples=25)
def test_no_plan_is_worse_than_one_device_or_least_work(costs, objective):
    start = min(single_plans(costs), key=lambda plan: worth(costs, plan, objective))
    time = worth(costs, best_plan(costs, start, objective, max_plans=30), objective)
    assert time <= worth(costs, start, objective)
    assert time <= worth(costs, min_work(costs, start), objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_of_more_units_the_plan_is_nearly_the_best(objective):
    """The search proper: only eight plans of clusters are tried, out of 512 plans."""
    ratios = []
    for seed in range(20):
        costs = random_costs(random.Random(seed), 9)
        plan = best_plan(costs, [0] * 9, objective, max_plans=8)
        ratios.append(worth(costs, plan, objective) / min(worth(costs, p, objective) for p in all_plans(costs)))
    assert max(ratios) < 1.05 and np.mean(ratios) < 1.005


def random_costs(rng, count):
    units = [WorkUnit([str(i)], [Work(rng.choice([1e6, 3e6, 1e7, 5e7]), 0)]) for i in range(count)]
    values = [WorkValue(rng.uniform(1e4, 1e6), OUTSIDE, [0])]
    for maker in range(count):
        readers = [reader for reader in range(maker + 1, min(count, maker + 5)) if rng.random() < 0.4]
        values.append(WorkValue(rng.uniform(1e4, 1e6), maker, readers or [maker + 1 if maker + 1 < count else OUTSIDE]))
    speeds = [DeviceCost(rng.choice([5e9, 1e10]), 1e12, 1e-7) for _ in range(2)]
    return PlanCosts(WorkGraph(units, values), CostModel(speeds, links(2, 0), 0))


@given(st.lists(st.integers(1, 9), min_size=13, max_size=40), st.integers(0, 20))
@settings(max_examples=25)
def test_a_chain_on_two_devices_is_cut_no_worse_than_where_that_is_best(flops, size):
    costs = costs_of(*chain(flops, size))
    best = min(max(costs.busy_queues([0] * cut + [1] * (len(flops) - cut)), default=0) for cut in range(len(flops) + 1))
    assert max(costs.busy_queues(best_plan(costs, [0] * len(flops), "throughput"))) <= best


@pytest.mark.parametrize("count", [2, 12, 40])
def test_a_chain_of_equal_units_is_cut_into_halves(count):
    costs = costs_of(*chain([5] * count, 1), host=1)
    plan = best_plan(costs, [0] * count, "throughput")
    # The transfer is the work of the second device's queue.
    assert sorted(costs.busy_queues(plan)) == [count // 2 * 5 * SECOND, (count // 2 * 5 + 1) * SECOND]
    assert plan == [plan[0]] * (count // 2) + [plan[-1]] * (count // 2)


def test_a_chain_of_three_equal_parts_on_three_devices():
    costs = costs_of(*chain([4] * 12, 1), devices=[DeviceCost(1, 1e30, 0)] * 3)
    plan = best_plan(costs, [0] * 12, "throughput")
    assert [device for device, _ in itertools.groupby(plan)] == list(dict.fromkeys(plan))
    assert max(costs.busy_queues(plan)) == 17 * SECOND


def test_one_call_of_a_chain_stays_on_one_device():
    flops, values = chain([5] * 12, 1)
    assert len(set(best_plan(costs_of(flops, values), [0] * 12, "latency"))) == 1


@pytest.mark.parametrize(
    ("length", "overlaps", "seconds"),
    [(1, False, 1 + 10 + 1), (3, False, 1 + 30 + 1), (30, True, 1 + 10 + 150 + 10 + 1)],
)
def test_one_call_overlaps_two_branches_that_are_worth_it(length, overlaps, seconds):
    # A unit, two branches of equal length, and a unit that reads both. Going over costs as much as two units.
    left, right = range(1, 2 * length, 2), range(2, 2 * length + 1, 2)
    values = [(10, 0, [1, 2]), (10, left[-1], [2 * length + 1]), (10, right[-1], [2 * length + 1])]
    values += [(10, a, [b]) for branch in (left, right) for a, b in itertools.pairwise(branch)]
    costs = costs_of([1, *[5] * (2 * length), 1], values)
    plan = best_plan(costs, [0] * (2 * length + 2), "latency")
    assert call_ticks(costs, plan) == seconds * SECOND
    assert ({plan[unit] for unit in left} != {plan[unit] for unit in right}) == overlaps


def test_devices_that_take_turns_gain_nothing_by_a_cut():
    flops, values = chain([5] * 12, 1)
    for objective in OBJECTIVES:
        assert len(set(best_plan(costs_of(flops, values, queues=(0, 0)), [0] * 12, objective))) == 1


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_many_units_are_planned_with_bounded_effort(objective, monkeypatch):
    """From each starting point the search looks at a bounded number of units and values."""
    measures = []

    def noted(kind):
        def wrapper(*arguments):
            measures.append(kind(*arguments))
            return measures[-1]

        return wrapper

    for name in ("CallTime", "BusiestQueue"):
        monkeypatch.setattr(plan_search, name, noted(getattr(plan_search, name)))
    costs = random_costs(random.Random(0), 700)
    plan = best_plan(costs, [0] * 700, objective)
    # The last step may begin just below the limit, and a step looks at everything at most three times.
    last_step = 3 * (len(costs.graph.units) + len(costs.graph.values))
    assert len(measures) < 10
    assert 0 < max(measure.effort for measure in measures) <= plan_search._MAX_EFFORT + last_step
    best = min(worth(costs, single, objective) for single in single_plans(costs))
    assert worth(costs, plan, objective) < (0.9 if objective == "latency" else 0.7) * best


@given(problems(2, most_units=12, in_order=False), st.integers(1, 12))
@settings(max_examples=60)
def test_levels_are_partitions_of_which_each_refines_the_one_before(costs, fewest):
    levels = cluster_levels(costs, fewest)
    for clusters in levels:
        assert sorted(unit for units in clusters for unit in units) == list(range(len(costs.ops)))
        assert all(units == sorted(units) for units in clusters)
    for coarse, fine in zip(levels, levels[1:], strict=False):
        assert len(coarse) < len(fine)
        for units in fine:
            assert any(set(units) <= set(larger) for larger in coarse)
    assert all(len(units) == 1 for units in levels[-1])
    assert len(levels[0]) >= min(fewest, len(costs.ops))


def test_a_chain_becomes_stretches_of_it():
    flops, values = chain([5] * 64, 1)
    coarsest = cluster_levels(costs_of(flops, values), 4)[0]
    assert len(coarsest) in range(4, 9)
    assert all(units == list(range(units[0], units[-1] + 1)) for units in coarsest)


def test_units_between_which_much_passes_stay_together():
    costs = costs_of([5] * 4, [(1, 0, [1]), (100, 1, [2]), (1, 2, [3]), (100, 0, [3])])
    assert cluster_levels(costs, 2)[0] == [[0, 3], [1, 2]]


def test_a_unit_that_is_most_of_the_work_is_joined_with_no_other():
    costs = costs_of([90, 5, 5, 5, 5], [(100, 0, [1]), (1, 1, [2]), (1, 2, [3]), (1, 3, [4])])
    coarsest = cluster_levels(costs, 4)[0]
    assert [0] in coarsest and len(coarsest) == 4
