"""Graphs of models as plain data: a round trip, files without one, and numbers that refer to nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from relax_hetero.artifact.model_graph import FunctionGraph, GraphNode, GraphValue, ModelGraph, check_graph
from relax_hetero.artifact.typed_data import check_types, from_data, to_data

X = GraphNode(0, 1, 0, 0, 4, (0,), ())
Y = GraphNode(2, 2, 3, 2, 4, (0,), (0, -1))
GRAPH = ModelGraph(
    ("", "x", "y", "relax.exp", "llvm:0", "float32"), (GraphValue(("n", 4), 5, -1),), (FunctionGraph("main", (X, Y)),)
)


def test_a_graph_survives_json():
    again = from_data(ModelGraph, json.loads(json.dumps(to_data(GRAPH))))
    assert again == GRAPH
    check_types(again)
    check_graph(GRAPH)


def test_older_files_have_none():
    assert from_data(ModelGraph | None, None) is None


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (replace(Y, kind=9), "the kind of node 1 of the graph of 'main' is 9, expected 0 to 4"),
        (replace(Y, op=6), "a text of node 1 of the graph of 'main' is 6, expected 0 to 5"),
        (replace(Y, values=(1,)), "a value of node 1 of the graph of 'main' is 1, expected 0 to 0"),
        (replace(Y, reads=(1, -1)), "a node that node 1 of the graph of 'main' reads is 1, expected 0 to 0"),
        (replace(Y, reads=(0, 1)), "a position that node 1 of the graph of 'main' reads is 1, expected -1 to 0"),
        (replace(Y, reads=(0,)), "node 1 of the graph of 'main' reads 1 numbers, expected pairs"),
    ],
)
def test_numbers_that_refer_to_nothing_are_refused(node: GraphNode, message: str):
    with pytest.raises(ValueError, match=message):
        check_graph(replace(GRAPH, functions=(FunctionGraph("main", (X, node)),)))
