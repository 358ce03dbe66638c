"""Routes of plans: their slots, and the contents of messages."""

from __future__ import annotations

import pytest

from relax_hetero.cluster import CALL, CallPlan, HostStep, Program, Source
from relax_hetero.cluster.route import END, routes_of
from relax_hetero.errors import HeteroError

A0 = HostStep("a", "f", (Source(CALL, 0),), 2)
B1 = HostStep("b", "g", (Source(0, 1),), 1)


def test_a_chain_sends_only_what_the_next_host_reads() -> None:
    plan = CallPlan((A0, B1), (Source(1, 0), (Source(0, 0), Source(CALL, 0))), ("x",))
    (route,) = routes_of({"main": plan})
    first, second = route.tasks
    assert (first.inputs, first.targets, first.is_last) == ((CALL,), (1, END), True)
    assert first.work["main"].sends == ((1,), (0,))
    assert (second.inputs, second.targets) == ((0,), (END,))
    assert second.work["main"].arguments == ((0, 0),)
    assert route.sent["main"] == {0: (0,)}
    assert route.results["main"] == {Source(1, 0): (1, 0), Source(0, 0): (0, 0), Source(CALL, 0): (CALL, 0)}


def test_values_that_a_host_reads_again_stay_there() -> None:
    steps = (A0, B1, HostStep("a", "h", (Source(0, 0), Source(1, 0), Source(CALL, 1)), 1))
    (route,) = routes_of({"main": CallPlan(steps, Source(2, 0), ("x", "y"))})
    first, _, third = route.tasks
    assert first.targets == (1,) and first.work["main"].keeps == (0,) and not first.is_last
    assert third.follows == (0,) and third.inputs == (CALL, 1) and third.is_last
    assert third.work["main"].arguments == ((0, 0), (1, 0), (CALL, 0))
    assert route.sent["main"] == {0: (0,), 2: (1,)}


def test_functions_on_the_same_hosts_share_a_route() -> None:
    short = CallPlan((A0, HostStep("b", "k", (Source(CALL, 0),), 1)), Source(1, 0), ("x",))
    plans = {"other": CallPlan((B1.__class__("b", "g", (Source(CALL, 0),), 1),), Source(0, 0), ("x",))}
    routes = routes_of({**plans, "decode": short, "main": CallPlan((A0, B1), Source(1, 0), ("x",))})
    assert [sorted(route.sent) for route in routes] == [["decode", "main"], ["other"]]
    first, second = routes[0].tasks
    assert second.inputs == (CALL, 0)  # decode reads the call's input there, and main what a made
    assert first.work["decode"].sends == ((),) and routes[0].sent["main"] == {0: (0,), 1: ()}


def test_every_slot_has_a_message_to_begin_by_and_one_at_its_end() -> None:
    steps = (HostStep("a", "f", (), 1), HostStep("b", "g", (), 1))
    (route,) = routes_of({"main": CallPlan(steps, Source(1, 0))})
    assert [slot.inputs for slot in route.tasks] == [(CALL,), (CALL,)]
    assert [slot.targets for slot in route.tasks] == [(END,), (END,)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (CallPlan((), Source(CALL, 0), ("x",)), "no steps"),
        (CallPlan((A0,), Source(0, 2), ("x",)), "number 2 of 2 results of step 0"),
        (CallPlan((A0,), Source(0, 0), ()), "number 0 of 0 inputs"),
        (CallPlan((B1,), Source(0, 0), ("x",)), "reads step 0, expected -1 or a step before it"),
        (CallPlan((HostStep("c", "f", (), 1),), Source(0, 0)), "host 'c', expected one of 'a', 'b'"),
    ],
)
def test_plans_that_cannot_run_are_refused(plan: CallPlan, message: str) -> None:
    with pytest.raises(HeteroError, match=message):
        Program({"a": "a.so", "b": "b.so"}, {"main": plan}).check()
