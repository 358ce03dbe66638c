"""Clusters of units, coarse to fine."""

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.plan_problems import chain, costs_of, problems
from relax_hetero.frontend.auto.unit_clusters import cluster_levels


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
