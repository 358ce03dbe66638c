"""AnnotateGraph: edges between ops, with shapes and devices; tuples and branches are looked through."""

from __future__ import annotations

from tvm.script import relax as R

from modules import ir_module
from relax_hetero.artifact.model_graph import KINDS
from relax_hetero.transform import AnnotateGraph, RealizeVDevice, RecordRemarks
from relax_hetero.transform.ir.remarks import remarks_of


@ir_module("llvm", ('{"kind":"llvm"}',))
def Split(x: R.Tensor(("n", 4), "float32", "llvm:0")):
    with R.dataflow():
        parts = R.split(x, 2, axis=1)
        second = parts[1]
        doubled = R.add(second, R.const(1.0, "float32"))
        R.output(doubled)
    return doubled


def test_ops_read_fields_of_tuples_and_constants():
    noted = AnnotateGraph()(RealizeVDevice()(RecordRemarks()(Split)))
    graph = remarks_of(noted).graph
    assert graph is not None
    (function,) = graph.functions
    shown = [(KINDS[node.kind], graph.texts[node.name], list(node.pairs())) for node in function.nodes]
    assert shown == [
        ("input", "x", []),
        ("op", "parts", [(0, -1)]),
        ("constant", "constant 0", []),
        ("op", "doubled", [(1, 1), (2, -1)]),
        ("output", "result 0", [(3, -1)]),
    ]
    assert [graph.values[value].shape for value in function.nodes[1].values] == [("n", 2), ("n", 2)]
    assert {graph.texts[node.device] for node in function.nodes} == {"llvm:0"}
    assert AnnotateGraph()(noted).same_as(noted)


def test_a_module_that_keeps_no_findings_stays():
    assert AnnotateGraph()(Split).same_as(Split)
