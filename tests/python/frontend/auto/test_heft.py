"""HEFT: a plan made unit by unit."""

import itertools

from hypothesis import given

from frontend.plan_problems import chain, costs_of, problems
from relax_hetero.frontend.auto.plan_search import heft


@given(problems(3, in_order=False))
def test_every_unit_gets_a_device(costs):
    plan = heft(costs)
    assert len(plan) == len(costs.ops) and set(plan) <= {0, 1, 2}


def test_a_chain_stays_where_it_began():
    flops, values = chain([5] * 10, 1)
    assert heft(costs_of(flops, values)) == [0] * 10


def test_chains_that_share_nothing_run_side_by_side():
    costs = costs_of([5] * 20, [(1, unit, [unit + 2]) for unit in range(18)])
    plan = heft(costs)
    assert [set(plan[0::2]), set(plan[1::2])] in ([{0}, {1}], [{1}, {0}])


def test_a_unit_goes_where_it_is_fast():
    costs = costs_of([5, 5, 5], [(1, a, [b]) for a, b in itertools.pairwise(range(3))])
    costs.ops[1][0] *= 10
    assert heft(costs) == [0, 1, 1]


def test_devices_of_one_queue_wait_for_each_other():
    flops = [5, 5]
    assert len(set(heft(costs_of(flops, [])))) == 2
    assert len(set(heft(costs_of(flops, [], queues=(0, 0))))) == 1
