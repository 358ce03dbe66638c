"""Minimum cuts: the plan with the least total work."""

import numpy as np
from hypothesis import given, settings

from frontend.plan_problems import all_plans, costs_of, links, problems, single_plans
from relax_hetero.frontend import CostModel, DeviceCost
from relax_hetero.frontend.auto.plan_costs import PlanCosts
from relax_hetero.frontend.auto.plan_search import Network, min_work
from relax_hetero.frontend.auto.work_graph import Work, WorkGraph, WorkUnit, WorkValue


@given(problems(2, in_order=False))
@settings(max_examples=60)
def test_the_plan_for_two_devices_is_the_best_there_is(costs):
    plan = min_work(costs, min(single_plans(costs), key=costs.total))
    assert costs.total(plan) == min(map(costs.total, all_plans(costs)))


@given(problems(3, in_order=False))
def test_the_plan_for_three_is_never_worse_than_the_one_to_start_with(costs):
    best = min(map(costs.total, all_plans(costs)))
    for start in single_plans(costs):
        assert best <= costs.total(min_work(costs, start)) <= costs.total(start)


def test_a_value_goes_to_a_device_once():
    # One producer that is fast on the first device only, three readers that are fast on the second only.
    costs = costs_of([9, 9, 9, 9], [(10, 0, [1, 2, 3])])
    costs.ops[0][1] = 100 * costs.ops[0][0]
    for unit in (1, 2, 3):
        costs.ops[unit][0] = 100 * costs.ops[unit][1]
    plan = min_work(costs, [0, 0, 0, 0])
    assert plan == [0, 1, 1, 1]
    assert costs.total(plan) == (4 * 9 + 10) * 10**12


def test_five_thousand_units_are_placed_in_few_phases(monkeypatch):
    """Each phase of a cut walks the network once; a bad order of walks would need about one for each unit."""
    phases = []
    levels = Network._levels
    monkeypatch.setattr(Network, "_levels", lambda self, *ends: phases.append(len(self._head)) or levels(self, *ends))
    rng = np.random.default_rng(0)
    count = 5000
    units = [WorkUnit([str(i)], [Work(10 ** rng.uniform(3, 9), 10 ** rng.uniform(3, 7))]) for i in range(count)]
    values = [
        WorkValue(10 ** rng.uniform(3, 6.5), i, sorted({i + 1, min(count - 1, i + int(rng.integers(1, 300)))}))
        for i in range(count - 1)
    ]
    model = CostModel([DeviceCost(1e11, 8e10, 1e-7), DeviceCost(1e12, 2e10, 1e-6)], links(2, 0), 0)
    costs = PlanCosts(WorkGraph(units, values), model)
    best = min(single_plans(costs), key=costs.total)
    plan = min_work(costs, best)
    assert 0 < len(phases) < 100 and max(phases) < 20 * count
    assert costs.total(plan) < costs.total(best)
    assert set(plan) == {0, 1}
