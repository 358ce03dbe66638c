"""Simulated work on shared resources: by hand, and properties of random tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.test_meshes import from_bench
from relax_hetero.frontend.auto.simulate import Task, simulate


def test_a_pipeline_of_two_stages():
    """Stage b of a text waits for its stage a, and for stage b of the last text."""
    tasks = [Task(2, (), {"a": 1}), Task(3, (0,), {"b": 1}), Task(2, (), {"a": 1}), Task(3, (2,), {"b": 1})]
    assert simulate(tasks) == [2, 5, 4, 8]


def test_delays_take_nothing_and_cores_are_shared():
    tasks = [Task(1, (), {"cores": 2}), Task(1, (), {"cores": 1}), Task(1, (), {"cores": 1}), Task(5), Task(1, (3,))]
    assert simulate(tasks, {"cores": 2}) == [1, 2, 2, 5, 6]
    assert simulate(tasks, {"cores": 4}) == [1, 1, 1, 5, 6]


def test_what_waits_for_one_resource_leaves_the_others_free():
    """A part that waits for its device takes no core, on which another device's part can run."""
    tasks = [Task(2, (), {"cores": 1, "a": 1}), Task(2, (), {"cores": 1, "a": 1}), Task(2, (), {"cores": 1, "b": 1})]
    assert simulate(tasks, {"cores": 2}) == [2, 4, 2]


def test_a_large_task_is_not_overtaken_for_ever():
    small = [Task(1, (number - 2,) if number > 1 else (), {"cores": 1}) for number in range(8)]
    ends = simulate([*small, Task(1, (), {"cores": 2})], {"cores": 2})
    assert ends[-1] == 2


def test_calls_of_a_network():
    """One at a time; as many as there are stages; limited by cores; limited by calls under way."""
    simulate_calls = from_bench("cluster_bench.simulated_networks", "simulate_calls")
    stages, transfers = [4.0, 4.0], [1.0, 1.0, 1.0]
    assert simulate_calls(stages, transfers, 3) == 3 * 11
    assert simulate_calls(stages, transfers, 10, 10) == 1 + 4 * 10 + 1 + 4 + 1
    assert simulate_calls(stages, transfers, 10, 10, cores=1) == 10 * 11
    assert simulate_calls(stages, transfers, 10, 2) == 5 * (11 + 0) + 4
    with pytest.raises(ValueError, match="found 2 transfers, expected 3"):
        simulate_calls(stages, transfers[:2], 1)


@pytest.mark.parametrize(
    ("tasks", "message"), [([Task(1, (0,))], "expected an earlier one"), ([Task(1, (), {"a": 2})], "2 units of 'a'")]
)
def test_errors(tasks, message):
    with pytest.raises(ValueError, match=message):
        simulate(tasks)


@st.composite
def problems(draw):
    tasks = []
    for number in range(draw(st.integers(1, 12))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=2)) if number else set()
        units = draw(st.dictionaries(st.sampled_from("ab"), st.integers(1, 2), max_size=2))
        tasks.append(Task(draw(st.integers(1, 9)), sorted(after), units))
    return tasks


@given(problems())
def test_random_tasks_keep_order_and_capacity(tasks):
    ends = simulate(tasks, {"a": 2, "b": 3})
    begins = [end - task.seconds for end, task in zip(ends, tasks, strict=True)]
    for begin, task in zip(begins, tasks, strict=True):
        assert all(ends[before] <= begin for before in task.after)
    for name, units in {"a": 2, "b": 3}.items():
        for begin in begins:
            active = [task for task, b, e in zip(tasks, begins, ends, strict=True) if b <= begin < e]
            assert sum(task.units.get(name, 0) for task in active) <= units
    # Nothing waits without a reason: some task ends when a later one begins.
    assert all(begin == 0 or begin in ends for begin in begins)
