"""Groups of kernels: the nodes that each computes, numbered through all functions."""

import pytest

from relax_hetero.artifact.metadata import DeviceSpec, DispatchSpec, Metadata
from relax_hetero.artifact.model_graph import FunctionGraph, GraphNode, ModelGraph
from relax_hetero.artifact.schedule import Schedule, Step
from relax_hetero.report.executable_report import groups_of
from relax_hetero.vm.profile import Profile, ProfileRow

ENTRY = {"variable": "y", "kernel": "k", "device": "llvm:0", "ops": ["exp"], "precision": "f32"}


def nodes_of_groups(*entries):
    node = GraphNode(2, 0, 0, 0, 0, (), ())
    graph = ModelGraph(("",), (), (FunctionGraph("first", (node,) * 3), FunctionGraph("second", (node,) * 2)))
    dispatches = [{**ENTRY, **entry} for entry in entries]
    about = Metadata((), -1, {}, fusions={"dispatches": dispatches, "missed": []}, graph=graph)
    return [group["nodes"] for group in groups_of(about)]


def test_nodes_are_numbered_through_all_functions():
    calls = ({"function": "first", "nodes": [2]}, {"function": "second", "nodes": [0, 1]})
    assert nodes_of_groups(*calls) == [[2], [3, 4]]


def test_kernels_of_an_earlier_version_name_no_nodes():
    assert nodes_of_groups({"function": "first"}) == [[]]


def test_a_kernel_that_two_devices_share_has_the_times_of_each():
    """Equal devices run one kernel; times, calls and steps are those of the device."""
    calls = [("main", "a", 0), ("main", "b", 1), ("main", "c", 0), ("other", "a", 1)]
    entries = [{**ENTRY, "function": f, "variable": v, "device": f"llvm:{i}"} for f, v, i in calls]
    devices = (DeviceSpec('{"kind": "llvm"}', 0, "global"), DeviceSpec('{"kind": "llvm"}', 1, "global"))
    steps = tuple(Step(i, (0,), (1,), f"main_step_{v}", calls=("k",)) for f, v, i in calls[:3])
    spec = DispatchSpec(0, ("exp",), other_devices=(1,))
    about = Metadata(
        devices, -1, {"main": None, "other": None}, fusions={"dispatches": entries, "missed": []},
        dispatches={"k": spec}, schedules=(Schedule("main", 1, 2, steps, 1),),
    )  # fmt: skip
    rows = tuple(ProfileRow("k", f"llvm:{i}", ("exp",), 2 - i, 100.0 * (1 + i), 0.1) for i in (0, 1))
    groups = groups_of(about, [Profile("main", rows, 1000.0)])
    assert [(group["calls"], group["seconds"]) for group in groups[:3]] == [(1, 5e-5), (1, 2e-4), (1, 5e-5)]
    assert [group["step"] for group in groups] == ["main_step_a", "main_step_b", "main_step_c", None]


def test_times_and_shares_of_the_peak_are_those_of_a_call():
    fusions = {"dispatches": [{**ENTRY, "function": "main"}] * 2, "missed": []}
    about = Metadata((), -1, {}, fusions=fusions, dispatches={"k": DispatchSpec(0, ("exp",), 10**6, 10**3, "f32")})
    row = ProfileRow("k", "llvm:0", ("exp",), 4, 800.0, 0.8, 10**6, 10**3, "f32")
    peak = {"operations_per_second": {"f32": 1e10}, "bytes_per_second": 1e10}
    for group in groups_of(about, [Profile("main", (row,), 1000.0)], {"llvm:0": peak}):
        assert (group["calls"], group["seconds"]) == (2, pytest.approx(4e-4))
        assert (group["share_of_peak"], group["bound"]) == (pytest.approx(0.5), "arithmetic")
