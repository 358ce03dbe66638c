"""Groups of kernels: the nodes that each computes, numbered through all functions."""

from relax_hetero.artifact.metadata import Metadata
from relax_hetero.artifact.model_graph import FunctionGraph, GraphNode, ModelGraph
from relax_hetero.report.kernel_groups import groups_of

ENTRY = {"variable": "y", "kernel": "k", "device": "llvm:0", "ops": ["exp"], "precision": "f32"}


def nodes_of_groups(*entries):
    node = GraphNode(2, 0, 0, 0, 0, (), ())
    graph = ModelGraph(("",), (), (FunctionGraph("first", (node,) * 3), FunctionGraph("second", (node,) * 2)))
    dispatches = [{**ENTRY, **entry} for entry in entries]
    about = Metadata((), -1, {}, fusions={"dispatches": dispatches, "declined": []}, graph=graph)
    return [group["nodes"] for group in groups_of(about)]


def test_nodes_are_numbered_through_all_functions():
    calls = ({"function": "first", "nodes": [2]}, {"function": "second", "nodes": [0, 1]})
    assert nodes_of_groups(*calls) == [[2], [3, 4]]


def test_kernels_of_an_earlier_version_name_no_nodes():
    assert nodes_of_groups({"function": "first"}) == [[]]
