"""Costs of plans: the time of one call in which independent work overlaps, and measures that follow moving units."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.plan_problems import SECOND, SLOW, all_plans, chain, costs_of, problems
from relax_hetero.frontend.auto.plan_costs import BusiestQueue, CallTime, call_ticks
from relax_hetero.frontend.auto.work_graph import OUTSIDE


def seconds(costs, plan):
    ticks = call_ticks(costs, plan)
    assert ticks % SECOND == 0
    return ticks // SECOND


def test_a_chain_costs_the_sum_of_its_parts():
    costs = costs_of(*chain([3, 4, 5], 1))
    assert seconds(costs, [0, 0, 0]) == 12
    assert seconds(costs, [0, 1, 0]) == 14


def test_branches_overlap_and_meet():
    # 0 is read by 1 and 2, whose results 3 reads.
    values = [(1, 0, [1, 2]), (1, 1, [3]), (1, 2, [3])]
    costs = costs_of([2, 10, 7, 1], values)
    assert seconds(costs, [0, 0, 0, 0]) == 20
    # 2 on the other device: from 2 to 3 a transfer, to 10 work, to 11 a transfer, when 1 is still at work to 12.
    assert seconds(costs, [0, 0, 1, 0]) == 14  # the transfer back waits for its queue
    assert seconds(costs, [0, 1, 0, 1]) == 15


def test_a_queue_runs_ready_units_in_program_order():
    # 1 reads a value from the other device that arrives at 4; 2, after it in the program, does not wait for that.
    costs = costs_of([3, 5, 4], [(1, 0, [1])])
    assert seconds(costs, [1, 0, 0]) == 10  # 4 of unit 2, the transfer, 5 of unit 1
    # Both are ready at the start: 1 goes first, so that 0 of the other device ends at 5 + 1 + 4.
    costs = costs_of([5, 1, 4], [(1, 0, [2])])
    assert seconds(costs, [0, 0, 1]) == 10


def test_devices_of_one_queue_take_turns():
    flops, values = [5, 5], []
    assert seconds(costs_of(flops, values), [0, 1]) == 5
    assert seconds(costs_of(flops, values, queues=(0, 0)), [0, 1]) == 10


def test_inputs_come_from_the_host_and_outputs_go_there():
    values = [(2, OUTSIDE, [0]), (3, 0, [OUTSIDE])]
    assert seconds(costs_of([5], values), [0]) == 5
    assert seconds(costs_of([5], values), [1]) == 10
    assert seconds(costs_of([5], values, host=-1), [0]) == 10  # no queue of its own: the device's carries both


def test_reads_before_the_writer_do_not_wait():
    assert seconds(costs_of([5, 5], [(1, 1, [0])]), [0, 0]) == 10


@given(problems(3, in_order=False), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_a_call_takes_no_more_than_all_work_and_no_less_than_the_busiest_queue(costs, rng: random.Random):
    plan = [rng.randrange(3) for _ in costs.ops]
    assert max(costs.busy_queues(plan)) <= call_ticks(costs, plan) <= costs.total(plan)


@given(problems(2))
@settings(max_examples=30)
def test_a_call_on_one_queue_takes_the_sum_of_all_work(costs):
    costs.queue_of, costs.queues = [0, 0], 1
    for plan in all_plans(costs):
        assert call_ticks(costs, plan) == costs.total(plan)


@given(problems(2, most_units=8), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_same_as_looking_at_every_step_at_every_moment(costs, rng: random.Random):
    plan = [rng.randrange(2) for _ in costs.ops]
    assert call_ticks(costs, plan) == stepwise(costs, plan)


def stepwise(costs, plan):
    """The same schedule, written as it is defined: at each moment look at every step."""
    steps = [((2 * unit + 1,), plan[unit], costs.ops[unit][plan[unit]], set()) for unit in range(len(plan))]
    for value in costs.graph.values:
        source = costs.device_of(value.producer, plan)
        producers = set() if value.producer == OUTSIDE else {value.producer}
        for destination in dict.fromkeys(costs.device_of(reader, plan) for reader in value.readers):
            readers = [r for r in value.readers if r != OUTSIDE and plan[r] == destination]
            if destination == source:
                for reader in readers:
                    steps[reader][3].update(producers)
                continue
            for reader in readers:
                steps[reader][3].add(len(steps))
            place = (2 * min(readers, default=len(plan)), len(steps))
            carrier = destination if destination >= 0 else source
            steps.append((place, carrier, costs.transfer(value.size, source, destination), set(producers)))
    ends, done, now = {}, set(), 0
    while len(done) < len(steps):
        for queue in range(costs.queues):
            if not any(steps[step][1] == queue for step in ends if step not in done):
                ready = [i for i, step in enumerate(steps) if step[1] == queue and i not in ends and step[3] <= done]
                if ready:
                    first = min(ready, key=lambda i: (steps[i][0], i))
                    ends[first] = now + steps[first][2]
        now = min(end for step, end in ends.items() if step not in done)
        # One at a time, in order of number: what it makes ready may begin before the next one ends.
        done.add(min(step for step, end in ends.items() if step not in done and end == now))
    return now


def test_a_device_alone_is_as_fast_as_it_is():
    assert seconds(costs_of([4, 4], [], devices=(SLOW,)), [0, 0]) == 8


def keys(costs, plan):
    busy = tuple(sorted(costs.busy_queues(plan), reverse=True))
    return {BusiestQueue: busy, CallTime: (call_ticks(costs, plan), costs.total(plan))}


@given(problems(3, in_order=False), st.randoms(use_true_random=False), st.sampled_from([BusiestQueue, CallTime]))
@settings(max_examples=60)
def test_incremental_costs_equal_recomputed_ones(costs, rng: random.Random, kind):
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


def test_effort_counts_visited_units():
    costs = costs_of([1, 1, 1, 1], [(1, 0, [1]), (1, 1, [2])])
    queue, call = BusiestQueue(costs, [0] * 4), CallTime(costs, [0] * 4)
    before = call.effort
    queue.move([3], [1])
    call.move([3], [1])
    assert (queue.effort, call.effort - before) == (1, 4 + 2)
    assert queue.key == (3 * SECOND, SECOND)
