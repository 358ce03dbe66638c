"""Measures that follow a plan while units move."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.plan_problems import SECOND, costs_of, problems
from relax_hetero.frontend.auto.list_schedule import call_ticks
from relax_hetero.frontend.auto.plan_measures import BusiestQueue, CallTime


def keys(costs, plan):
    busy = tuple(sorted(costs.busy_queues(plan), reverse=True))
    return {BusiestQueue: busy, CallTime: (call_ticks(costs, plan), costs.total(plan))}


@given(problems(3, in_order=False), st.randoms(use_true_random=False), st.sampled_from([BusiestQueue, CallTime]))
@settings(max_examples=60)
def test_what_follows_is_what_is_found_afresh(costs, rng: random.Random, kind):
    if rng.random() < 0.5:
        costs.queue_of, costs.queues = [0, 1, 0], 2
    plan = [rng.randrange(3) for _ in costs.ops]
    measure = kind(costs, plan)
    for _ in range(8):
        units = rng.sample(range(len(plan)), rng.randint(1, len(plan)))
        devices = [rng.randrange(3) for _ in units]
        moved = list(plan)
        for unit, device in zip(units, devices, strict=True):
            moved[unit] = device
        if rng.random() < 0.5:
            measure.move(units, devices)
            plan = moved
        else:
            measure.improve(units, devices)
            plan = moved if keys(costs, moved)[kind] < keys(costs, plan)[kind] else plan
        assert measure.plan == plan
        assert measure.key == keys(costs, plan)[kind]


def test_effort_counts_what_was_looked_at():
    costs = costs_of([1, 1, 1, 1], [(1, 0, [1]), (1, 1, [2])])
    queue, call = BusiestQueue(costs, [0] * 4), CallTime(costs, [0] * 4)
    before = call.effort
    queue.move([3], [1])
    call.move([3], [1])
    assert (queue.effort, call.effort - before) == (1, 4 + 2)
    assert queue.key == (3 * SECOND, SECOND)
